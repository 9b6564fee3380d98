"""The record of a judgement: what one drafter does in one engine on one set of questions, as a file to publish.

`Record` is the document, `Absence` says why a drafter has none in an engine. record.schema.json beside this file is the
JSON Schema of both, for readers in other languages. Numbers with an interval are [value, low, high]; the interval is
95 %, over questions. null stands for what the engine or the client does not say.

    python -m specdec.measuring.record      writes record.schema.json anew
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from specdec.core import files
from specdec.core.option_types import Count, NonNegative, Options, Share, Text, Whole

SCHEMA = "specdec/record/1"
ABSENCE_SCHEMA = "specdec/absence/1"
RECORD_FILE = "record.json"
MAX_CHANCE = 0.05  # p-value below which drafts change more answers than a second plain server does
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
Bound = float | None
Figure = tuple[float, Bound, Bound] | None  # value, low and high of its 95 % interval; None: unknown
CountSource = Literal["per_request", "counters", "timings", "stream", "replay"]
Digest = Annotated[str, Field(min_length=1)]  # hexadecimal digits of a hash, or a fingerprint with its dtype


class RecordedTarget(Options):
    """The target as the engine serves it."""

    name: Text
    revision: Text | None = None
    digest: Digest | None = None  # fingerprint of its weights
    quantisation: Text | None = None  # method, or the type of a GGUF file; None: none
    kv_cache: Text | None = None  # dtype of keys and values
    dtype: Text | None = None  # dtype that the weights are computed in


class RecordedDrafter(Options):
    """The drafter as the engine runs it."""

    name: Text
    method: Text  # eagle3, mtp, suffix, ngram, ..
    revision: Text | None = None
    digest: Digest | None = None
    layers: Count | None = None
    window: Count | None = None  # positions
    trained_length: Count | None = None  # tokens of the longest training text
    draft_vocab: Count | None = None  # tokens; None: the target's vocabulary


class RecordedEngine(Options):
    name: Text
    version: Text | None = None
    flags: list[str] = []  # command line, without folders, addresses and keys
    # No server says the next three: who knows them writes them by hand
    runner: Text | None = None
    draft_sampling: Literal["greedy", "probabilistic"] | None = None
    adaptive: bool | None = None  # whether the number of drafts changes from round to round


class RecordedMachine(Options):
    """The machine of the engine. None: unknown, as of a server elsewhere."""

    device: Text | None = None
    count: Count | None = None  # devices
    parallel: Text | None = None  # kind and size of parallelism
    busy: Share | None = None  # share of the CPU that other programs took meanwhile, mean over the batches


class RecordedProtocol(Options):
    """Everything on which the acceptance length depends beside target and drafter."""

    suite: Text  # name of the set
    file: Text | None = None  # name of the file whose questions were asked
    revision: Text | None = None
    licence: Text | None = None
    ids_sha256: Digest | None = None  # digest of the ids of all first turns, as JSON; None: the server rendered them
    endpoint: Text  # v1/completions or v1/chat/completions
    template_sha256: Digest | None = None  # digest of the chat template's text
    thinking: bool | None = None
    effort: Text | None = None
    system: Text | None = None  # system message of all questions
    temperature: NonNegative
    top_p: float | None = None  # None: none was asked for
    top_k: int | None = None  # likewise
    repetition_penalty: float | None = None  # 1: none; None: unknown
    max_tokens: Count
    drafts: Count | None = None  # drafts of a round, at most
    stop: list[str] = []
    ignore_stop: bool | None = None  # whether answers go on behind the model's end tokens; None: unknown
    turns: Count = 1
    seed: Whole | None = None


class RecordedCounting(Options):
    """How the acceptance length was counted."""

    # counters: those of the engine since its start; stream: events of answers, as many as the counters have rounds
    source: CountSource | None  # None: the engine says nothing
    first_token: bool = False  # whether the first token of an answer counts as emitted by a round
    prompt_pass: bool = False  # whether the pass over the prompt counts as a round
    tail_drafts: bool = False  # whether drafts behind the end of an answer count
    average: Literal["pooled", "turns", "prompts"] = "pooled"


class RecordedLoad(Options):
    """Figures under a number of requests at once."""

    at_once: Count
    prompts: Whole  # answered questions, each with all its turns
    failed: Whole = 0  # requests without an answer
    tau: Figure
    by_position: list[Share] = []  # share of rounds that accepted at least 1, 2, .. drafts
    drafted: Whole | None = None  # drafts of all rounds
    user_tok_s: Figure = None  # tokens/s of a user, median over answers
    total_tok_s: Figure = None  # tokens/s of all requests together
    plain_user_tok_s: Figure = None
    speedup: Figure = None  # tokens/s of a user with drafts over without, median over answers asked both ways


class RecordedGroup(Options):
    """Figures of some of the answers, at the first load."""

    prompts: Whole
    tau: Figure
    rounds: Whole | None = None  # rounds of the group; None in older records, and where answers are grouped


class RecordedGroups(Options):
    category: dict[str, RecordedGroup] = {}
    # Rounds by bucket, such as "256-511"
    context: dict[str, RecordedGroup] = {}  # tokens before a round
    answer: dict[str, RecordedGroup] = {}  # tokens of the answer before a round
    ungrouped: Text | None = None  # reason why the server's rounds are in no bucket
    # Whole answers by bucket: where there is this reason, and in older records
    prompt_tokens: dict[str, RecordedGroup] = {}
    answer_tokens: dict[str, RecordedGroup] = {}


class RecordedDifference(Options):
    """The first round that accepts another number of drafts than replay does."""

    prompt: Text
    round: Whole
    token: Whole  # place in the answer
    served: Whole  # accepted drafts
    replayed: Whole


class RecordedControl(Options):
    """Greedy answers that are equal, as [equal, compared], of the same prompts."""

    plain_plain: tuple[Whole, Whole] | None = None  # two servers without drafts
    drafted_plain: tuple[Whole, Whole] | None = None  # a server with drafts, and the first of these
    # Chance of as few equal answers with drafts, if drafts changed nothing: exact sign test over the prompts of which
    # one pair alone is equal. Below 0.05, drafts change more answers than another plain server does.
    p_value: Share | None = None

    @property
    def changes_more(self) -> bool | None:
        """Whether drafts change more answers than a second plain server does. False: no sign of that.

        None: it cannot be told, as even without any equal answer the chance would not be below MAX_CHANCE.
        """
        if self.p_value is None or self.plain_plain is None or 0.5 ** self.plain_plain[0] >= MAX_CHANCE:
            return None
        return self.p_value < MAX_CHANCE


class RecordedChecks(Options):
    """Whether the figures mean what they seem to mean. None: not checked, as the engine or the client lacks what it
    needs.
    """

    template: Literal["same ids as tokenizer", "other ids than tokenizer"] | None = None
    replay_tau: Figure = None  # tau of the head along the served answers
    served_is_trained: bool | None = None
    first_difference: RecordedDifference | None = None
    control: RecordedControl | None = None  # None: there was no second server without drafts
    repeat: tuple[Whole, Whole] | None = None  # answers to one request sent again at load 1: [equal, compared]
    others_traffic: Whole | None = None  # tokens that the server generated for others meanwhile
    unchecked: dict[str, Text] = {}  # reason, by the name of a check that is null


class Record(Options):
    """The judgement of one drafter in one engine on one set of questions."""

    form: Annotated[Literal["specdec/record/1"], Field(alias="schema")]
    when: Text  # ISO 8601
    target: RecordedTarget
    drafter: RecordedDrafter | None  # None: the server does not draft
    engine: RecordedEngine
    machine: RecordedMachine
    protocol: RecordedProtocol
    counting: RecordedCounting
    loads: Annotated[list[RecordedLoad], Field(min_length=1)]
    by: RecordedGroups = RecordedGroups()
    checks: RecordedChecks = RecordedChecks()
    notes: list[str] = []


class Absence(Options):
    """Why there is no record of a drafter in an engine."""

    form: Annotated[Literal["specdec/absence/1"], Field(alias="schema")]
    drafter: Text  # its name
    engine: Text
    suite: Text | None = None  # None: on any
    reason: Text  # a sentence


Document = Annotated[Record | Absence, Field(discriminator="form")]
FORM: TypeAdapter[Record | Absence] = TypeAdapter(Document)


def write_record(path: Path, document: Record | Absence) -> None:
    """Writes a record, which is read back first: only a valid one comes to the disk."""
    text = document.model_dump_json(by_alias=True, indent=1) + "\n"
    FORM.validate_json(text)
    files.write_text(path, text)


def read_record(path: Path) -> Record | Absence:
    """The record in a file. Raises ValueError, naming the file and the field, for any other document."""
    try:
        return FORM.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a record of specdec judge.") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise ValueError(
            f"{path} is no record of specdec judge ({field}: {first['msg']}). {SCHEMA_FILE.name} has its form."
        ) from None


def make_schema() -> dict[str, Any]:
    """The JSON Schema of both documents."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **drop_titles(FORM.json_schema(by_alias=True))}


def drop_titles(schema: Any) -> Any:
    """A JSON Schema without pydantic's titles, which repeat the names of the fields."""
    if isinstance(schema, dict):
        return {name: drop_titles(value) for name, value in schema.items() if name != "title"}
    return [drop_titles(value) for value in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    files.write_text(SCHEMA_FILE, json.dumps(make_schema(), indent=1) + "\n")
