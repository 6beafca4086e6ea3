"""What the server counts, under vLLM's names, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shallowdraft.decoding.results import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """In a registry of their own, all with the model's name."""

    def __init__(self, model: str, lookahead: int) -> None:
        self._registry = CollectorRegistry()
        self._model, self._lookahead = model, lookahead
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts read.")
        self._drafts = self._counter("spec_decode_num_drafts", "Proposals, one a row and iteration.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens proposed.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the proposal.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._by_position = [by_position.labels(model, str(position)) for position in range(lookahead)]
        self._ended = Counter(
            "vllm:request_success", "Requests answered.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._first_s = self._histogram("time_to_first_token_seconds", "Seconds from a request to its first token.")
        self._whole_s = self._histogram("e2e_request_latency_seconds", "Seconds from a request to its last token.")

    def begun(self, prompt_tokens: int, first_s: float) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._first_s.observe(first_s)

    def iterated(self, accepted: int) -> None:
        """Count an iteration of a row."""
        if self._lookahead:
            self._drafts.inc()
            self._draft_tokens.inc(self._lookahead)
            self._accepted.inc(accepted)
            for position in self._by_position[:accepted]:
                position.inc()

    def ended(self, reason: FinishReason, whole_s: float) -> None:
        self._ended.labels(self._model, "stop" if reason == "stop" else "length").inc()
        self._whole_s.observe(whole_s)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, what: str) -> Histogram:
        name = f"vllm:{name}"
        return Histogram(name, what, ["model_name"], registry=self._registry, buckets=SECONDS).labels(self._model)
