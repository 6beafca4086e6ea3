"""The process that renders chat templates: a line of JSON in, a line of JSON out.

It is run as a file, without the package. Templates are programs that come with checkpoints: after `longest_s` an alarm
signal ends this process, whatever the template is doing; the system limits its memory.
"""

import json
import resource
import signal
import sys
from pathlib import Path


def main(longest_s: float, memory_bytes: int, longest: int) -> None:
    """Answer questions from standard input until it is closed."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _limit_memory(memory_bytes)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, longest_s)
        question = json.loads(line)
        try:
            text = _compile_jinja_template(question["template"]).render(**question["variables"])
            too_long = {"error": f"it writes more than {longest:,} characters"}
            answer = {"text": text} if len(text) <= longest else too_long
        except MemoryError:
            answer = {"error": f"it needs more than {memory_bytes >> 20:,} MiB of memory"}
        except Exception as error:  # a template can raise anything
            answer = {"error": _reason(error)}
        reply = json.dumps(answer) + "\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(reply)
        sys.stdout.flush()


def _reason(error: Exception) -> str:
    """Return an error's message on one line of at most 500 characters, or its class if it has none."""
    return " ".join(str(error)[:500].split()) or type(error).__name__


def _limit_memory(more_bytes: int) -> None:
    """Limit the process to `more_bytes` beyond what it uses now, where /proc tells how much that is; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
