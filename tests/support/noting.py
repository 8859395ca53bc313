"""The beginning of scripts whose processes note themselves beside those of the same worker, and say in the file "twice"
if one of these is alive.
"""

NOTES = """
import fcntl, os, time
def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
RANK = os.environ.get("PACELINE_RANK", "0")
with open(f"processes-{RANK}", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    others = [pid for pid in file.read().split() if alive(pid)]
    file.write(f"{os.getpid()}\\n")
    if others:
        open("twice", "a").write(f"worker {RANK}: {os.getpid()} beside {others}\\n")
"""
