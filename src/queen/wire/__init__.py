"""What travels and what is stored: ids, requests, and the segment codec. Imports nothing of the rest."""
