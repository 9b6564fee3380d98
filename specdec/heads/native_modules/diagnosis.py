"""What is wrong with a model's own MTP modules, read from its files alone, tensor by tensor.

Tests by number: 1 lost or of unknown names, 2 never had, 3 undeclared, 4 incomplete, 5 misnumbered, 6 stale, 7 tuned,
8 quantised, 9 plain inside a quantised file and undeclared, 10 dead, 11 shifted norms, 12 swapped join, 13 stale
copies, 14 resized vocabulary, 15 adapter, 16 GGUF (gguf.py). `Diagnosis.lines` words what they found.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

from torch import Tensor

from specdec.core import hub
from specdec.core.dequantise import ACTIVATION_SCALES, PLAIN_DTYPES, find_form, read_plain
from specdec.core.shards import NoSafetensors, Shards, fetch_file
from specdec.core.untrusted import read_json
from specdec.core.wording import format_count
from specdec.heads.native_modules.comparison import (
    ZERO_CENTRED,
    compare_copies,
    find_origin,
    find_shifts,
    is_join_swapped,
    list_norms,
)
from specdec.heads.native_modules.files import (
    COUNT_KEYS,
    EXPERT,
    ModelFiles,
    StoredModule,
    name_plain,
    name_role,
    read_count,
)
from specdec.heads.native_modules.gguf import examine_gguf
from specdec.heads.native_modules.layouts import FAMILIES
from specdec.heads.native_modules.plain_layers import is_plain_layer

SOUND, NONE = "sound", "none"
# States in which no module works, or not as it was trained: a whole module of the base takes its place
NEED_BASE = ("lost", "never had", "unknown layout", "incomplete", "dead")
# States that another name, key or value repairs
REPAIRABLE = (
    "misnumbered",
    "undeclared",
    "swapped join",
    "shifted norms",
    "resized vocabulary",
    "stale copies",
    "plain undeclared",
)
STATES = ("adapter", *NEED_BASE, *REPAIRABLE, "quantised", "stale", "tuned")  # the worst one first
# Depths of published models whose configuration class declares a module that a model never had
PUBLISHED_DEPTHS = {"deepseek_v3": (61,), "glm4_moe": (46, 92)}
WHOLE_ADVICE = "Take the base's module whole, never a mixture of both."
SMALLEST_SPREAD = 1e-3  # standard deviation of a matrix that has lost its values
SPREAD_RATIO = 10  # largest ratio of standard deviations to the model's own tensor of the same role


@dataclass(frozen=True)
class Finding:
    """What one test found.

    test: its number, as above; tensor: the name of the first tensor that it is about; sentence: the evidence
    """

    test: int
    state: str
    tensor: str | None
    sentence: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What the files of a model say of its MTP modules.

    state: the worst state of the findings, `sound` or `none` without any; declared: modules that config.json counts
    modules: modules in the files; layout: name of their layout
    """

    name: str
    state: str
    declared: int
    modules: int
    layout: str | None
    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        """The diagnosis in words: its state, then each finding with its remedy."""
        layout = f", layout {self.layout}" if self.layout else ""
        head = (
            f"MTP module of {self.name}: {self.state} ({self.declared} declared, {self.modules} in the files{layout})"
        )
        return [head, *(f"  {item.state}: {item.sentence} {item.remedy}" for item in self.findings)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict:
        """The same as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict) -> Self:
        """The diagnosis of which these are the values."""
        return cls(**{**document, "findings": tuple(Finding(**values) for values in document["findings"])})


def diagnose_module(name: str, *, revision: str | None = None, base: str | None = None) -> Diagnosis:
    """The diagnosis of a model's MTP modules, from its files.

    name: a folder, a name on the Hub, or a GGUF file; base: the unmodified model that it comes from, which tells more
    Raises ValueError for files that are missing or damaged.
    """
    if name.endswith(".gguf"):
        return diagnose_gguf(name)
    repo, tag = split_name(name, revision)
    try:
        model = open_model(repo, tag)
    except NoSafetensors:
        adapter = fetch_file(repo, "adapter_config.json", revision=tag)
        if adapter is None:
            raise
        return make_diagnosis(name, 0, [], [find_adapter(read_json(adapter))])
    base_model = None if base is None else open_model(base)
    findings = [*find_absence(model, base_model), *find_miscounted(model)]
    for module in model.modules:
        findings += itertools.chain(find_misplaced(model, module), find_missing(model, module))
        findings += itertools.chain(find_quantised(model, module), find_undeclared_plain(model, module))
        findings += itertools.chain(find_dead(model, module), find_differences(model, module))
        if not any(finding.state in NEED_BASE for finding in findings):
            findings += find_shifted(model, module, base_model)
            findings += () if base_model is None else compare_with_base(model, module, base_model)
    return make_diagnosis(name, read_count(model.config), model.modules, findings)


def count_things(number: int, noun: str) -> str:
    """The beginning of a sentence: 1 tensor is, 2 tensors are."""
    return f"{format_count(number, noun)} {'is' if number == 1 else 'are'}"


def open_model(name: str, revision: str | None = None) -> ModelFiles:
    """A model's files by place. name: a folder, or a name on the Hub with @revision; raises ValueError as `Shards`"""
    repo, tag = split_name(name, revision)
    return ModelFiles(Shards(repo, revision=tag))


def split_name(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """A folder or a name on the Hub, and the revision that is given or stands behind @."""
    repo, _, tag = (name, "", "") if hub.is_folder(name) else name.partition("@")
    return repo, revision or tag or None


def diagnose_gguf(path: str) -> Diagnosis:
    """The diagnosis of a GGUF file. Raises ValueError for a file that cannot be read."""
    declared, modules, states = examine_gguf(path, describe_dead)
    state = min((item[0] for item in states), key=STATES.index, default=SOUND if modules else NONE)
    return Diagnosis(path, state, declared, modules, None, tuple(Finding(16, *item) for item in states))


def make_diagnosis(name: str, declared: int, modules: list[StoredModule], findings: list[Finding]) -> Diagnosis:
    """The diagnosis with the worst state of its findings, which come in the order of STATES."""
    findings = sorted(findings, key=lambda finding: STATES.index(finding.state))
    state = SOUND if modules else NONE
    layout = modules[0].layout if modules else None
    return Diagnosis(name, findings[0].state if findings else state, declared, len(modules), layout, tuple(findings))


def find_adapter(config: dict) -> Finding:
    """The finding for a folder of LoRA weights. config: adapter_config.json"""
    base = config.get("base_model_name_or_path")
    return Finding(
        15, "adapter", None, f"An adapter has no module of its own; its base is {base}.", f"Diagnose {base} instead."
    )


# Modules that are absent, uncounted, misnumbered or incomplete


def find_absence(model: ModelFiles, base: ModelFiles | None) -> Iterator[Finding]:
    """The finding for files without a module of a known layout: unknown layout, never had, lost."""
    if model.modules:
        return
    declared, unknown, base_modules = read_count(model.config), model.find_unknown(), base.modules if base else None
    if unknown:
        yield describe_unknown(model, unknown)
    elif declared and (base_modules == [] or (base is None and is_counted_by_default(model))):
        reason = f"{base.shards.name} has none either" if base else "transformers counts one for all of this family"
        sentence = f"config.json counts {declared} and no tensor belongs to one; {reason}."
        remedy = "Set the count to 0 and train the head `mtp`, or give source= with a model that has one."
        yield Finding(2, "never had", None, sentence, remedy)
    elif declared or base_modules:
        sentence = f"config.json counts {declared} and no tensor joins an embedding with a state."
        options = f"checkpoint={model.shards.name} source=BASE prompts=FILE old= out=FOLDER"
        remedy = f"This grafts and heals the base's module: `specdec adapt {options}`"
        yield Finding(1, "lost", None, sentence, remedy)


def describe_unknown(model: ModelFiles, names: list[str]) -> Finding:
    """The finding for tensors that look like those of a module without a known join."""
    counts, shown = count_things(len(names), "tensor"), ", ".join(names[:3])
    if model.model_type in FAMILIES:
        sentence, remedy = f"{counts} left of a module ({shown}), and no join.", WHOLE_ADVICE
        return Finding(4, "incomplete", names[0], sentence, remedy)
    remedy = "The names are in no known layout: train the head `mtp`, or give source= with names that are known."
    return Finding(1, "unknown layout", names[0], f"{counts} named as those of modules ({shown}).", remedy)


def is_counted_by_default(model: ModelFiles) -> bool:
    """Whether transformers wrote the count, as it does for some families, and no published model has this depth."""
    depths = PUBLISHED_DEPTHS.get(model.model_type, (model.num_layers,))
    return model.num_layers not in depths and "transformers_version" in model.config


def find_miscounted(model: ModelFiles) -> Iterator[Finding]:
    """The finding for modules that the configuration does not count, or of which some are missing."""
    if not model.modules:
        return
    count, declared, join = len(model.modules), read_count(model.config), model.modules[0].outer["join"]
    if declared == 0:
        sentence = f"{join} is there, and config.json counts no module ({', '.join(COUNT_KEYS[:2])})."
        yield Finding(3, "undeclared", join, sentence, "Write the family's key with the number of modules.")
    elif count < declared and model.modules[0].kind.distinct:
        sentence = f"The files have {count} of the {declared} modules that config.json counts, one for each draft."
        yield Finding(4, "incomplete", join, sentence, WHOLE_ADVICE)


def find_misplaced(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """The finding for a module whose layer does not follow the model's last one."""
    expected = model.num_layers + module.number
    if module.layer is None or module.layer == expected:
        return
    yield Finding(
        5,
        "misnumbered",
        module.outer["join"],
        f"{module.outer['join']} is at layer {module.layer}, and the model has {model.num_layers} layers.",
        f"Rename its tensors to layer {expected}.",
    )


def find_missing(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """The finding for tensors that the module lacks, or that have another shape than in the model's own layers."""
    lacks = list_missing(model, module)
    sentence = f"{count_things(len(lacks), 'tensor')} missing ({', '.join(lacks[:3])})."
    if not lacks:
        shapes = list_misshapen(model, module)
        if not shapes:
            return
        lacks = [shapes[0][0]]
        sentence = f"{shapes[0][0]} has the shape {list(shapes[0][1])}, and of this model it would be {shapes[0][2]}."
    yield Finding(4, "incomplete", lacks[0], sentence, WHOLE_ADVICE)


def list_missing(model: ModelFiles, module: StoredModule) -> list[str]:
    """The names of tensors that the module lacks."""
    present = {name_plain(name) for name in module.names}
    missing = [name for name in module.outer.values() if name not in present]
    for stem, block in module.blocks.items():
        original_stem, alike = model.find_alike(block)
        missing += [stem + role for role in alike.keys() - block.keys() if not is_packed_bias(role, alike)]
        expert_names = {
            stem + name_plain(name).removeprefix(original_stem) for name in itertools.chain(*alike.values())
        }
        missing += list_missing_experts(present, expert_names)
    return sorted(set(missing))


def is_packed_bias(role: str, alike: dict[str, list[str]]) -> bool:
    """Whether a role is a bias that GPTQ gives all of its linears, of zeros. alike: the model's layer by role"""
    names = alike.get(role.removesuffix("bias") + "weight", ())
    return role.endswith(".bias") and any(name.endswith(".qweight") for name in names)


def list_missing_experts(present: set[str], expected: set[str]) -> set[str]:
    """The names of tensors that single experts lack, in a module whose experts are apart.

    present: plain names of the module's tensors; expected: those of its layer, by the model's layer like it
    """
    experts = {name for name in present if EXPERT.match(name)}
    endings = {match[3] for match in map(EXPERT.match, experts) if match}
    numbers = {(match[1], match[2]) for match in map(EXPERT.match, experts) if match}
    names = {f"{stem}.{number}.{ending}" for stem, number in numbers for ending in endings}
    if experts:
        names |= {name for name in expected if EXPERT.match(name)}
    return names - present


def list_misshapen(model: ModelFiles, module: StoredModule) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Tensors of the module with another shape than the model's: (name, shape, shape that fits)."""
    width, shards = int(model.text_config.get("hidden_size") or 0), model.shards
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(module.outer_norms, (width,))
    shapes[module.outer["join"]] = (width, 2 * width)
    head = module.outer.get("head")
    original_head = None if head is None else model.find_original(head)
    head_shape = None if original_head is None else find_shape(shards, original_head)
    if head is not None and head_shape is not None:
        shapes[head] = (head_shape[0], width)
    for name, original in pair_weights(model, module):
        shape = find_shape(shards, original)
        if shape is not None:
            shapes[name] = shape
    misshapen = []
    for name, expected in shapes.items():
        shape = find_shape(shards, name)
        if shape not in (None, expected):
            misshapen.append((name, shape or (), list(expected)))
    return misshapen


def find_shape(shards: Shards, name: str) -> tuple[int, ...] | None:
    """The shape of a weight by its plain name; None: it is absent, or in a form that does not tell."""
    try:
        form = find_form(shards, name)
    except ValueError:
        return None
    return None if form is None else form.plain_shape


def pair_weights(model: ModelFiles, module: StoredModule) -> Iterator[tuple[str, str]]:
    """Yields weights of the module's layers by plain name, each with that of the same name in the layer like it."""
    for stem, block in module.blocks.items():
        original_stem, _ = model.find_alike(block)
        for name in dict.fromkeys(map(name_plain, itertools.chain.from_iterable(block.values()))):
            yield name, original_stem + name.removeprefix(stem)


# Values


def find_dead(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """The finding for weights without sound values: NaN, Inf, zero, constant, or of another spread than the model's."""
    dead = list(list_dead(model, module))
    if dead:
        more = f", and {len(dead) - 1} more" if len(dead) > 1 else ""
        remedy = "Take the base's module whole, and heal it."
        yield Finding(10, "dead", dead[0][0], f"{dead[0][0]} {dead[0][1]}{more}.", remedy)


def list_dead(model: ModelFiles, module: StoredModule) -> Iterator[tuple[str, str]]:
    """Yields weights by plain name, with what shows that they have no sound values."""
    originals = dict(pair_weights(model, module))
    norms = () if model.model_type in ZERO_CENTRED else list_norms(model, module)

    @functools.cache
    def measure_spread(role: str) -> float | None:  # one of the model's weights stands for all of its role
        original = read_weight(model, next(name for name in originals.values() if name_role(name) == role))
        return None if original is None else float(original.float().std())

    for name in dict.fromkeys(name_plain(key) for key in module.names if key not in module.copies):
        value = read_weight(model, name)
        if value is None:
            continue
        reason = describe_dead(value, is_norm=name in norms)
        if reason is None and value.dim() >= 2:
            expected = measure_spread(name_role(originals[name])) if name in originals else None
            reason = compare_spread(float(value.float().std()), expected)
        if reason is not None:
            yield name, reason


def read_weight(model: ModelFiles, name: str) -> Tensor | None:
    """A weight by its plain name, dequantised; None: it is absent, or in a form that is not read."""
    try:
        return read_plain(model.shards, name)
    except ValueError:
        return None


def describe_dead(value: Tensor, *, is_norm: bool = False) -> str | None:
    """What shows that a tensor has no sound values; None: nothing. Experts in one tensor are looked at one by one.

    is_norm: True for the weight of a norm, which zeros damage, too
    """
    if value.dim() == 3:
        reasons = ((number, describe_dead(expert)) for number, expert in enumerate(value))
        return next((f"(expert {number}) {reason}" for number, reason in reasons if reason is not None), None)
    low, high = (float(bound) for bound in value.float().aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return "has values that are NaN or infinite"
    if low != high or (value.dim() < 2 and not (is_norm and low == 0)):  # biases may be zero, norms constant
        return None
    return f"is {low:g} everywhere"


def compare_spread(spread: float, expected: float | None) -> str | None:
    """What shows that a matrix has another standard deviation than the model's of the same role; None: nothing."""
    if expected is None:
        return f"has a standard deviation of {spread:.2g}" if spread < SMALLEST_SPREAD else None
    if spread > SPREAD_RATIO * expected or (spread < SMALLEST_SPREAD and SPREAD_RATIO * spread < expected):
        return f"has a standard deviation of {spread:.2g}, and the model's own {expected:.2g}"
    return None


# Quantisation


def find_quantised(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """The finding for packed or scaled tensors."""
    packed = [name for name in module.names if is_packed(model, name) and not ACTIVATION_SCALES.fullmatch(name)]
    if packed:
        sentence = (
            f"{count_things(len(packed), 'tensor')} packed or scaled ({packed[0]}: {model.shards.dtype(packed[0])})."
        )
        remedy = "Nothing, where an engine reads this form; else take the base's module with source=."
        yield Finding(8, "quantised", packed[0], sentence, remedy)


def find_undeclared_plain(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """The finding for plain linears of which the configuration says that they are quantised."""
    layers = list_undeclared(model, module)
    if layers:
        counts = count_things(len(layers), "layer")
        sentence = f"{counts} plain, and missing in the list of such layers ({', '.join(layers[:3])})."
        remedy = "Write every linear of the module into the list."
        yield Finding(9, "plain undeclared", f"{layers[0]}.weight", sentence, remedy)


def list_undeclared(model: ModelFiles, module: StoredModule) -> list[str]:
    """Plain layers of the module that an engine would take for quantised ones.

    The model's own layers tell which roles are quantised. The join counts where a linear of the layer does.
    """
    names: list[str] = []
    for block in module.blocks.values():
        _, alike = model.find_alike(block)
        packed_roles = {role for role in alike if is_packed(model, alike[role][0])} & block.keys()
        names += itertools.chain(*(block[role] for role in packed_roles))
    join = module.outer["join"]
    if names and join in model.shards.files:
        names.append(join)
    layers = [name.removesuffix(".weight") for name in sorted(names) if not is_packed(model, name)]
    return [layer for layer in layers if is_undeclared(model, layer)]


def is_undeclared(model: ModelFiles, layer: str) -> bool:
    """Whether the configuration says that a layer is quantised."""
    declarations = [is_plain_layer(settings, layer) for settings in model.plain_settings]
    return bool(declarations) and not any(is_plain is not False for is_plain in declarations)


def is_packed(model: ModelFiles, name: str) -> bool:
    """Whether a tensor is packed or scaled."""
    return name_plain(name) != name or model.shards.dtype(name) not in PLAIN_DTYPES


# Comparisons with the model's own tensors, and with the base's


def find_differences(model: ModelFiles, module: StoredModule) -> Iterator[Finding]:
    """Findings for copies of the embedding and the LM head that are no copies any more."""
    for copy, original, difference in compare_copies(model, module):
        remedy = f"Copy {original} there; engines differ in which one they read."
        if difference is None:
            rows = len(model.shards[copy]), len(model.shards[original])
            sentence = f"{copy} has {rows[0]} rows and {original} {rows[1]}."
            yield Finding(14, "resized vocabulary", copy, sentence, remedy)
        else:
            sentence = f"{copy} differs from {original} by up to {difference:.2g}."
            yield Finding(13, "stale copies", copy, sentence, remedy)


def find_shifted(model: ModelFiles, module: StoredModule, base: ModelFiles | None) -> Iterator[Finding]:
    """The finding for norms around 0 whose weights were shifted by 1, or that lack a shift which the model has."""
    shifts = find_shifts(model, module, base)
    if shifts:
        name, shift = next(iter(shifts.items()))
        place, reference = ("above" if shift > 0 else "below"), "the base's" if base else "the model's own"
        sentence = f"{count_things(len(shifts), 'norm')} about 1 {place} {reference} ({name})."
        remedy = f"{'Subtract' if shift > 0 else 'Add'} 1 in these norms."
        yield Finding(11, "shifted norms", name, sentence, remedy)


def compare_with_base(model: ModelFiles, module: StoredModule, base: ModelFiles) -> Iterator[Finding]:
    """Findings that only the base shows: a swapped join, a module that tuning left behind, a tuned one."""
    join = module.outer["join"]
    if is_join_swapped(model, module, base):
        sentence = f"{join} has its halves in the other order than {base.shards.name}."
        yield Finding(12, "swapped join", join, sentence, "Swap them back.")
    elif not find_shifts(model, module, base):
        origin = find_origin(model, module, base)
        if origin == "stale":
            sentence = f"The module is that of {base.shards.name}, and the model's last layer is not."
            options = f"checkpoint={model.shards.name} prompts=FILE old= out=FOLDER"
            remedy = f"This heals it on the model's own answers: `specdec adapt {options}`"
            yield Finding(6, "stale", join, sentence, remedy)
        if origin == "tuned":
            sentence = f"The module is not that of {base.shards.name}, and the model's last layer is."
            yield Finding(7, "tuned", join, sentence, "Nothing is to be done.")
