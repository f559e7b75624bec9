"""A child that answers once, and then does not hear that its input has ended."""

import json
import sys
import time

if __name__ == "__main__":
    number = json.loads(sys.stdin.readline())["number"]
    print(json.dumps({"number": number, "result": None}), flush=True)
    time.sleep(60)
