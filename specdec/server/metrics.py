"""Counts for Prometheus, under the names of vLLM where it counts the same."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from specdec.decoding.batch import Step
from specdec.server.engine import Engine, Round

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """model: the name that every figure is labelled with"""

    def __init__(self, model: str):
        disable_created_metrics()
        self.registry, self.model = CollectorRegistry(), model
        ProcessCollector(registry=self.registry)  # memory and processor time

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self.registry)

        self.drafts = counter("spec_decode_num_drafts", "Rounds of requests that verified drafts")
        self.drafted = counter("spec_decode_num_draft_tokens", "Drafts that were verified")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafts that were accepted")
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Rounds that accepted a draft at this depth", "position"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.answer_tokens = counter("generation_tokens", "Tokens of answers")
        self.ended = counter("request_success", "Requests that ended, by how", "finished_reason")
        self.running = Gauge("vllm:num_requests_running", "Requests in a batch", ["model_name"], registry=self.registry)
        self.waiting = Gauge(
            "vllm:num_requests_waiting", "Requests in the queue", ["model_name"], registry=self.registry
        )
        self.rounds = Histogram(
            "specdec:round_seconds", "Rounds of a batch", ["model_name"], buckets=SECONDS, registry=self.registry
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token", ["model_name"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end", ["model_name"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip

    def saw_step(self, step: Step) -> None:
        self.rounds.labels(self.model).observe(step.cost.seconds)

    def saw_round(self, done: Round) -> None:
        """What a request got in a round."""
        self.answer_tokens.labels(self.model).inc(len(done.tokens))
        if done.drafted:
            self.drafts.labels(self.model).inc()
            self.drafted.labels(self.model).inc(done.drafted)
            self.accepted.labels(self.model).inc(done.accepted)
            for position in range(done.accepted):
                self.by_position.labels(self.model, str(position)).inc()

    def text(self, engine: Engine) -> bytes:
        """In Prometheus' format."""
        self.running.labels(self.model).set(engine.num_running)
        self.waiting.labels(self.model).set(engine.num_waiting)
        return generate_latest(self.registry)
