"""Wire and storage formats: ids, requests, and the segment codec. Imports nothing of the rest."""
