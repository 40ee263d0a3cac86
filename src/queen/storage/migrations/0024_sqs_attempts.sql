-- What receives of FIFO queues with a ReceiveRequestAttemptId have answered, for clients that did not get the answer.
CREATE TABLE queen.sqs_attempts (
    queue_id integer NOT NULL,
    attempt text NOT NULL,
    received text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue_id, attempt)
);
