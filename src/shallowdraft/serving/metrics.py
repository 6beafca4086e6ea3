"""Prometheus metrics of the server, under vLLM's names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shallowdraft.decoding.results import FinishReason

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters, gauges and histograms in a registry of this server, labelled with the model's name."""

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
        self._finished = Counter(
            "vllm:request_success", "Requests answered.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token."
        )
        self._total_s = self._histogram("e2e_request_latency_seconds", "Seconds from a request to its last token.")

    def count_prefill(self, prompt_tokens: int, first_token_s: float) -> None:
        """Count a prompt that was read and gave its first token."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token_s.observe(first_token_s)

    def count_iteration(self, accepted: int) -> None:
        """Count an iteration of one batch row."""
        if self._lookahead:
            self._drafts.inc()
            self._draft_tokens.inc(self._lookahead)
            self._accepted.inc(accepted)
            for position in self._by_position[:accepted]:
                position.inc()

    def count_finish(self, reason: FinishReason, total_s: float) -> None:
        """Count a request whose last token was generated."""
        self._finished.labels(self._model, "stop" if reason == "stop" else "length").inc()
        self._total_s.observe(total_s)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, description: str) -> Gauge:
        return Gauge(f"vllm:{name}", description, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"vllm:{name}", description, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, description: str) -> Histogram:
        histogram = Histogram(f"vllm:{name}", description, ["model_name"], registry=self._registry, buckets=BUCKETS_S)
        return histogram.labels(self._model)
