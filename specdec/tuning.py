"""Which chain or tree is fastest on this device: predicted from measured costs, then verified by decoding.

The model of speed is in docs/methods.md, section 8.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from specdec import replay, speed
from specdec.compile import Runner
from specdec.decode import Decoder
from specdec.drafter import Drafter
from specdec.drafting import Drafting
from specdec.experts import experts_of
from specdec.figures import rate_ratio_interval
from specdec.measurement import Prompt, PromptResult, seeded_generator
from specdec.proposers.stopping import Stopping
from specdec.report import Report
from specdec.sampling import Sampling
from specdec.speed import TimedAnswer
from specdec.timing import interleave

PLAIN = "plain"


def name_of(drafting: Drafting) -> str:
    """A short name of the shape: chain of 3, tree of 4x3x8 (depth x width x nodes)."""
    shape = drafting.shape
    if drafting.stopping is not None:
        return f"chain of up to {shape.depth}, stopping below {Stopping(**drafting.stopping).threshold:.2f}"
    return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"


@dataclass(frozen=True)
class Setting:
    """How to draft, with the prediction of its speed."""

    drafting: Drafting
    tau: float
    stages: dict[str, float]  # seconds a round
    plain: dict[str, float]  # the same of plain decoding, measured at the same time

    @property
    def name(self) -> str:
        return name_of(self.drafting)

    @property
    def predicted(self) -> float:
        """Speedup over plain decoding."""
        return speed.predict(self.tau, self.stages, self.plain)

    def explain(self) -> str:
        return speed.explain(self.name, self.tau, self.stages, self.plain)


@dataclass(frozen=True)
class Prediction:
    settings: list[Setting]
    costs: speed.ChainCosts | None  # of chains that may stop; None if stopping was not tried
    stops: bool  # whether the last setting stops early: stopping pays


class Tuner:
    """Measures and predicts how fast a drafter decodes these prompts in various shapes.

    seed: prompt n is decoded with random numbers of seed + n
    progress: takes a list and a description, and yields the items
    """

    def __init__(
        self,
        drafter: Drafter,
        prompts: list[Prompt],
        *,
        sampling: Sampling,
        stop: set[int],
        max_new_tokens: int,
        runner: Runner,
        seed: int,
        progress: Callable[[list, str], Iterable],
    ):
        self.drafter, self.prompts, self.sampling, self.stop = drafter, prompts, sampling, stop
        self.max_new_tokens, self.seed, self.progress = max_new_tokens, seed, progress
        self.runner = runner
        self.plain = Decoder(drafter.target, None, sampling=sampling, stop=stop, runner=self.runner)
        self.decoders: dict[str, Decoder] = {}  # by name_of, kept because compiling takes long

    def decoder(self, drafting: Drafting) -> Decoder:
        name = name_of(drafting)
        if name not in self.decoders:
            proposer = drafting.proposer(self.drafter)
            self.decoders[name] = drafting.decoder(
                self.drafter.target, proposer, sampling=self.sampling, stop=self.stop, runner=self.runner
            )
        return self.decoders[name]

    def decode(self, decoders: dict[str, Decoder], *, seed: int, description: str) -> dict[str, list[TimedAnswer]]:
        """Every prompt by every decoder, which take turns, after a warm-up. -> answers by the decoders' names"""
        target = self.drafter.target
        for decoder in self.progress(list(decoders.values()), "compiling" if self.runner.compile else "warm-up"):
            generator = seeded_generator(target, self.seed)
            decoder.generate([self.prompts[0].tokens], min(8, self.max_new_tokens), generator=generator)

        def time(decoder: Decoder) -> Callable[[int], TimedAnswer]:
            def time_prompt(number: int) -> TimedAnswer:
                generator = seeded_generator(target, seed + number)
                return speed.decode(decoder, self.prompts[number].tokens, self.max_new_tokens, generator)

            return time_prompt

        functions = {name: time(decoder) for name, decoder in decoders.items()}
        numbers = list(range(len(self.prompts)))
        answers = [interleave(functions, number, number) for number in self.progress(numbers, description)]
        return {name: [each[name] for each in answers] for name in decoders}

    def predict(self, draftings: list[Drafting], *, stopping: bool) -> Prediction:
        """Settings with their predicted speed: the given draftings, and if it pays a chain that stops early.

        Chains are replayed along the plain answers if replay applies. stopping: whether to try a chain that stops
        where its drafts are unlikely to survive. Raises ValueError if every answer ended with its first token.
        """
        chains = {drafting.depth: drafting for drafting in draftings if drafting.shape.chain}
        longest = max(chains, default=0)
        recording = replace(chains[longest], stopping={}) if stopping and longest > 1 else None  # never stops
        measured = [*draftings, recording] if recording else draftings
        decoders = {PLAIN: self.plain, **{name_of(drafting): self.decoder(drafting) for drafting in measured}}
        answers = self.decode(decoders, seed=self.seed, description="costs")
        if not any(answer.rounds for answer in answers[PLAIN]):
            raise ValueError("Every answer ended with its first token: give other prompts, or raise max_new_tokens.")
        stages = {name: speed.median_stages(each) for name, each in answers.items()}
        taus = self._taus(draftings, answers, longest)
        settings = [
            Setting(drafting, tau, stages[name_of(drafting)], stages[PLAIN]) for drafting, tau in zip(draftings, taus)
        ]
        rounds = speed.complete_rounds(answers[name_of(recording)]) if recording else []
        if not (recording and rounds):
            return Prediction(settings, None, False)
        chain_stages = {depth: stages[name_of(chain)] for depth, chain in chains.items()}
        experts = experts_of(self.drafter.target.config.to_dict())
        costs = speed.chain_costs(stages[PLAIN], chain_stages, stages[name_of(recording)], longest, experts)
        depth, plan = speed.plan_stopping(rounds, speed.fit_stopping(rounds), costs)
        if plan.threshold > 0:
            stops = replace(chains[longest], depth=depth, nodes=depth, stopping=asdict(plan))
            settings.append(self._measure(stops, "costs of stopping"))
        return Prediction(settings, costs, plan.threshold > 0)

    def _taus(self, draftings: list[Drafting], answers: dict[str, list[TimedAnswer]], longest: int) -> list[float]:
        """tau of each drafting: by replay along the plain answers if that applies, else as decoded."""
        replayable = [drafting.replayable(self.drafter, self.sampling) for drafting in draftings]
        chances = []
        if any(replayable):
            chances = [
                replay.acceptance(
                    self.drafter,
                    prompt.tokens,
                    answer.generation.tokens[0],
                    depth=longest,
                    temperature=self.sampling.temperature,
                )
                for prompt, answer in zip(self.prompts, answers[PLAIN])
            ]
        return [
            speed.replayed_tau(chances, drafting.depth) if applies else speed.decoded_tau(answers[name_of(drafting)])
            for drafting, applies in zip(draftings, replayable)
        ]

    def _measure(self, drafting: Drafting, description: str) -> Setting:
        """A setting whose tau and costs are decoded, beside plain decoding."""
        decoders = {PLAIN: self.plain, name_of(drafting): self.decoder(drafting)}
        answers = self.decode(decoders, seed=self.seed, description=description)
        stages = {name: speed.median_stages(each) for name, each in answers.items()}
        tau = speed.decoded_tau(answers[name_of(drafting)])
        return Setting(drafting, tau, stages[name_of(drafting)], stages[PLAIN])

    def verify(self, settings: list[Setting]) -> dict[str, list[PromptResult]]:
        """Decodes all prompts again, with other random numbers. -> results by the settings' names"""
        decoders = {PLAIN: self.plain, **{setting.name: self.decoder(setting.drafting) for setting in settings}}
        answers = self.decode(decoders, seed=self.seed + len(self.prompts), description="verification")
        return {
            setting.name: [
                PromptResult(prompt, plain.generation, drafted.generation, float("nan"), [], None)
                for prompt, plain, drafted in zip(self.prompts, answers[PLAIN], answers[setting.name])
            ]
            for setting in settings
        }


@dataclass(frozen=True)
class Choice:
    """The setting with the best prediction, unless another is measured to be faster beyond chance."""

    expected: Setting  # predicted to be the fastest
    best: Setting  # measured to be the fastest
    interval: list[float]  # 95 %, of the expected setting's tokens/s over those of the best
    final: Setting
    report: Report  # of the final setting

    @classmethod
    def of(
        cls, settings: list[Setting], results: dict[str, list[PromptResult]], reports: dict[str, Report]
    ) -> "Choice":
        """results, reports: of the verification, by the settings' names"""
        expected = max(settings, key=lambda setting: setting.predicted)
        best = max(settings, key=lambda setting: reports[setting.name].speedup or 0.0)
        interval = rate_ratio_interval(results[expected.name], results[best.name])
        final = expected if interval[1] >= 1 else best
        return cls(expected, best, interval, final, reports[final.name])

    def explain(self) -> str:
        """What was chosen, and whether it was the fastest measured."""
        if self.expected == self.best:
            text = f"{self.expected.name} was predicted to be the fastest, and was."
        else:
            text = (
                f"{self.expected.name} was predicted to be the fastest, but {self.best.name} was. The speed of the "
                "predicted one was {:.3f} .. {:.3f} of the fastest (95 %). ".format(*self.interval)
            )
            text += (
                "That is within the noise: the predicted one is chosen."
                if self.final == self.expected
                else "The fastest measured one is chosen."
            )
        assert self.report.speedup_ci is not None
        if self.report.speedup_ci[1] < 1:
            text += f" Plain decoding is faster than {self.final.name}: on this device, decode without this checkpoint."
        return text


def candidates(draftings: Iterable[Drafting], limit: int | None) -> tuple[list[Drafting], list[str]]:
    """Those for a drafter with `limit` steps (None: any number), each once, and the names of those that are too deep."""
    named = {name_of(drafting): drafting for drafting in draftings}
    fitting = {name: each for name, each in named.items() if limit is None or each.depth <= limit}
    return list(fitting.values()), [name for name in named if name not in fitting]
