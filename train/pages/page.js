// What a mark says when it is pointed at, touched or focused; curves that the legend switches off; tables sorted by a column;
// light or dark. Everything else on the page needs no script.
"use strict";

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
tip.setAttribute("role", "status");
document.body.append(tip);

function show(mark) {
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const at = mark.getBoundingClientRect();
  const left = Math.min(at.left + at.width / 2, innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (above > 0 ? above : at.bottom + 6) + "px";
}

for (const [shown, hidden] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  document.addEventListener(shown, event => {
    const mark = event.target.closest("[data-tip]");
    if (mark) show(mark);
  });
  document.addEventListener(hidden, () => { tip.hidden = true; });
}
document.addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    const curve = button.closest("figure").querySelector(`g[data-curve="${button.dataset.curve}"]`);
    curve.classList.toggle("off", !on);
  });
}

// The figure of a cell: its data-value, or the number that its text begins with.
function figure(row, column) {
  const cell = row.cells[column];
  const value = parseFloat(cell.dataset.value ?? cell.textContent.replace(/,/g, ""));
  return Number.isNaN(value) ? cell.textContent : value;
}

for (const table of document.querySelectorAll("table.sorted")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((first, second) => {
        const [a, b] = [figure(first, column), figure(second, column)];
        const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

const theme = document.getElementById("theme");
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
});
