"""The page of an adaptation: tau before and after of new and of old answers, what it took, and what was decided."""

from typing import Any

from specdec.measuring.figures import TAU
from train.adaptation_judging import distinct
from train.config import flat
from train.pages.charts import Axis, Curve, lines, number
from train.pages.page import render

SLICES = {"new": "New answers, held out", "old": "Old answers, held out: what was forgotten"}


def render_adaptation(history: list[dict[str, Any]], *, title: str) -> str:
    """history: documents as adaptation.json, the oldest first. The page is that of the last one."""
    document = history[-1]
    answer = {"accepted": "yes", "refused": "no"}.get(document["decision"], "unsure")
    slices = [(name, distinct(document["slices"][kind])) for kind, name in SLICES.items() if document["slices"][kind]]
    return render(
        "adaptation.html.jinja",
        title=title,
        data={"history": history},
        document=document,
        answer=answer,
        slices=slices,
        trained="training" in document,
        mixing=document.get("training", {}).get("mixing", []),  # earlier versions had none
        charts=[change_chart(part, name) for name, part in slices if "after" in part["all"]],
        history=history,
        minutes=", ".join(f"{name} {number(value)}" for name, value in document["minutes"].items()),
        settings=flat(document["settings"]),
        over_time=[time_chart(history)] if len(history) > 1 else [],
        tau_means=TAU,
    )


def change_chart(parts: dict[str, dict], name: str) -> Any:
    """tau of each part before and after, with intervals."""
    names = list(parts)
    places = list(range(1, len(names) + 1))
    curves = [
        Curve(
            when,
            [(place + shift, parts[part][when]) for place, part in zip(places, names)],
            marks=True,
            line=False,
            spans=[tuple(parts[part][f"{when}_ci"]) for part in names],
            tips=[f"{part}, {when}: {parts[part][when]:.2f}" for part in names],
        )
        for when, shift in (("before", -0.12), ("after", 0.12))
    ]
    numbers = [str(place) for place in places]
    return lines(curves, x=Axis("row of the table", ticks=places, names=numbers), y=Axis("tau"), title=f"{name}: tau")


def time_chart(history: list[dict]) -> Any:
    """tau of the new answers of every adaptation, which are others each time."""
    curves = []
    for when in ("before", "after"):
        found = [(int(each["number"]), each["slices"]["new"]["all"].get(when)) for each in history]
        curves.append(Curve(when, [(place, tau) for place, tau in found if tau is not None], marks=True))
    ticks = [int(each["number"]) for each in history]
    return lines(
        curves, x=Axis("adaptation", ticks=ticks), y=Axis("tau"), title="tau of the new answers of each adaptation"
    )
