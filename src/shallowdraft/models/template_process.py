"""Renders chat templates for the process that started it, a line of JSON in, a line of JSON out.

Run as a file, without the package. Templates are programs that come with checkpoints: one that takes
too long ends this process by a signal, whatever it is doing; memory is limited by the system.
"""

import json
import resource
import signal
import sys
from pathlib import Path


def main(longest_s: float, memory_bytes: int, longest: int) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template as compiled

    _limit_memory(memory_bytes)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, longest_s)
        asked = json.loads(line)
        try:
            text = compiled(asked["template"]).render(**asked["variables"])
            too_long = {"error": f"it writes more than {longest:,} characters"}
            answer = {"text": text} if len(text) <= longest else too_long
        except MemoryError:
            answer = {"error": f"it needs more than {memory_bytes >> 20:,} MiB of memory"}
        except Exception as error:  # whatever a program can do wrong
            answer = {"error": _reason(error)}
        said = json.dumps(answer) + "\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(said)
        sys.stdout.flush()


def _reason(error: Exception) -> str:
    """An error in one line of some length."""
    return " ".join(str(error)[:500].split()) or type(error).__name__


def _limit_memory(more_bytes: int) -> None:
    """Beyond what is in use, where the system tells how much that is."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
