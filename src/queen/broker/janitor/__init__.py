"""The background jobs that keep the database clean, run by one worker over all hosts."""
