"""Exit 0 when the server in this container answers 200 at the path given: the health check of the image."""

import os
import sys
import urllib.request

path = sys.argv[1] if len(sys.argv) > 1 else "/livez"
host = os.environ.get("HOST") or "0.0.0.0"
if host in ("0.0.0.0", "::"):
    host = "127.0.0.1"
url = f"http://{f'[{host}]' if ':' in host else host}:{os.environ.get('PORT') or 6632}{path}"
try:
    with urllib.request.urlopen(url, timeout=2) as answer:
        print(f"{url}: {answer.status}")
except OSError as error:
    sys.exit(f"{url}: {error}")
