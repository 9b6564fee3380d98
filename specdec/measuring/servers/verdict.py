"""The verdict on a server and its head: tau as served, beside replay of the head along the same answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.decoding.drafting import Drafting
from specdec.engines.engine_target import EngineTarget
from specdec.export.engines import drops_window, make_form
from specdec.export.layout import drop_draft_vocab
from specdec.export.mtp import zero_first_embedding
from specdec.heads.base import Drafter, Head
from specdec.heads.mtp import MTP
from specdec.measuring.replay import AnsweredPrompt, count_replays, replay_texts
from specdec.measuring.report import PromptCounts, compute_tau, subtract_tau
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch
from specdec.measuring.servers.server import LLAMA_CPP, OPENVINO, TRANSFORMERS, VLLM, find_longest
from specdec.unroll.replay import Replay

VERDICTS = {
    True: "served = trained",
    False: "served is NOT what was trained",
    None: "whether served = trained cannot be told from these answers",
}
# Differences of tau that still count as equal, see `decide_verdict`: real heads in engines differ by up to 0.6 % of tau
TOLERANCE, MIN_TOLERANCE = 0.05, 0.01
FORMATS = {LLAMA_CPP: "gguf", VLLM: "vllm", OPENVINO: "openvino", TRANSFORMERS: "transformers"}  # of heads, by server


def draft_as_engine(drafter: Head, kind: str) -> Head:
    """The drafter as an engine runs it: llama.cpp without a draft vocabulary, vLLM with the first embedding at zero.

    Engines that have no place for a head's window let it see all positions.
    """
    if isinstance(drafter, Drafter) and kind in FORMATS and drops_window(drafter, FORMATS[kind]):
        drafter = drafter.drop_window()
    if kind == LLAMA_CPP and isinstance(drafter, Drafter) and make_form(drafter, "gguf").whole_vocabulary:
        return drop_draft_vocab(drafter)
    return zero_first_embedding(drafter) if kind == VLLM and isinstance(drafter, MTP) else drafter


def compare_with_replay(
    drafter: Head,
    batches: list[ServedBatch],
    prompts: dict[str, dict],
    *,
    sampling: Sampling,
    depth: int,
    seed: int,
    engine: EngineTarget | None = None,
    questions: Mapping[str, str] = {},
) -> dict[str, Any]:
    """tau of the head along the answers, beside tau as served; at temperature 0 also the rounds that differ.

    prompts: parts of request bodies by prompt id; depth: drafts of a round, where the server does not say
    engine: servers that read the texts, in place of a target here; questions: see referee.name_questions
    Returns the figures with a `verdict`, or a verdict alone where nothing can be compared.
    """
    depth = find_longest(batches) or depth
    drafting = Drafting(depth=depth, width=1, nodes=depth)
    if not isinstance(drafter, Drafter) or not drafting.replayable(drafter, sampling):
        return {
            "verdict": f"a chain of {depth} of this head cannot be replayed with these settings: nothing is compared."
        }
    answers, served = find_replayable(batches)
    if not answers:
        return {
            "verdict": "the server gives no token ids, or no counts of each answer: nothing is compared with replay."
        }
    texts = [
        AnsweredPrompt(prompts[answer.prompt]["prompt"], answer.ids or [], sampling.temperature) for answer in answers
    ]
    replays = replay_texts(drafter, texts, depth=depth, label="replay", engine=engine)
    names = [referee.name_questions([answer], questions) for answer in answers]
    figures = {"depth": depth, **compare_tau(names, served, count_replays(replays), sampling, seed)}
    figures |= find_differences(answers, replays) if sampling.greedy else {"compared_by_round": 0, "differences": []}
    return {"verdict": describe_verdict(figures), "served_is_trained": decide_verdict(figures), **figures}


def find_replayable(batches: list[ServedBatch]) -> tuple[list[ServedAnswer], list[PromptCounts]]:
    """The answers with token ids of two tokens or more, and the server's counts of each."""
    pairs = list(zip(referee.list_answers(batches), referee.count_answers(batches) or ()))
    pairs = [(answer, counts) for answer, counts in pairs if len(answer.ids or ()) > 1]
    return [answer for answer, _ in pairs], [counts for _, counts in pairs]


def compare_tau(
    names: list[set[str]],
    served: list[PromptCounts],
    replayed: list[PromptCounts],
    sampling: Sampling,
    seed: int,
) -> dict[str, Any]:
    """tau as served and as replayed, with the interval of their difference. names: questions of each answer"""
    pairs = list(zip(served, replayed, strict=True))
    same_rounds = [
        round(served_count.num_rounds) == round(replayed_count.num_rounds) for served_count, replayed_count in pairs
    ]
    return {
        "answers": len(pairs),
        "served_tau": compute_tau(served),
        "replayed_tau": compute_tau(replayed),
        "replayed_tau_ci": referee.find_interval(replayed, names, compute_tau, seed),
        "difference": subtract_tau(pairs),
        "difference_ci": referee.find_interval(pairs, names, subtract_tau, seed),
        "same_number_of_rounds": sum(same_rounds) if sampling.greedy else None,
    }


def find_differences(answers: list[ServedAnswer], replays: Sequence[Replay]) -> dict[str, Any]:
    """The first round of each greedy answer that accepts another number of drafts than replay does."""
    compared, differences = 0, []
    for answer, replay in zip(answers, replays):
        if answer.server_counts is None or answer.server_counts.steps is None:
            continue
        compared += 1
        served, replayed = answer.server_counts.steps, referee.count_greedy_rounds(replay.acceptance)
        difference = referee.find_first_difference(served, replayed, replay.acceptance.shape[1])
        if difference:
            number, token = difference
            place_of_difference = {"prompt": answer.prompt, "round": number, "token": token}
            differences.append({**place_of_difference, "served": served[number], "replayed": replayed[number]})
    return {"compared_by_round": compared, "differences": differences}


def decide_verdict(figures: dict[str, Any]) -> bool | None:
    """Whether the head is served as it was trained; None where that cannot be told. figures: see `compare_tau`

    The tolerance is 5 % of what drafts add by replay, tau - 1, and at least .01. True: tau as served differs by no more
    than that, and the interval of the difference stays within twice as much. False: it differs by more, and the
    interval does not contain 0. Above temperature 0 tau as served is one draw of an expectation, so that the interval
    is wide. One question has no interval.
    """
    if figures["difference_ci"] is None:
        return None
    low, high = figures["difference_ci"]
    tolerance = max(MIN_TOLERANCE, TOLERANCE * (figures["replayed_tau"] - 1))
    if abs(figures["difference"]) > tolerance:
        return False if low > 0 or high < 0 else None
    return True if -2 * tolerance <= low and high <= 2 * tolerance else None


def describe_verdict(figures: dict[str, Any]) -> str:
    """The verdict in sentences. figures: see `compare_with_replay`"""
    served, replayed, compared = (figures[name] for name in ("served_tau", "replayed_tau", "compared_by_round"))
    verdict, interval = VERDICTS[decide_verdict(figures)], ""
    if figures["difference_ci"] is not None:
        interval = ", {:+.3f} .. {:+.3f}".format(*figures["difference_ci"])
    answers = format_count(figures["answers"], "answer")
    verdict += f": tau {served:.3f} served, {replayed:.3f} replayed along the same {answers} with chains "
    verdict += f"of {figures['depth']} ({figures['difference']:+.3f}{interval})"
    if figures["same_number_of_rounds"] is not None:
        verdict += f"; {figures['same_number_of_rounds']} took as many rounds"
    differences = figures["differences"]
    if not differences:
        return verdict + (
            f"; all rounds of {format_count(compared, 'answer')} accept as many drafts." if compared else "."
        )
    first = min(differences, key=lambda difference: difference["round"])
    return (
        f"{verdict}. {len(differences)} of {compared} answers part, prompt {first['prompt']} first, with the draft "
        f"for token {first['token']}: that round accepts {first['served']} drafts served, {first['replayed']} replayed."
    )
