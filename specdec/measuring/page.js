// Tables are sorted by a column when its head is clicked, and commands are copied. All else needs no script.
"use strict";

const SCALES = {K: 1e3, M: 1e6};

// The number that a cell begins with, or its text.
function value(cell) {
  const [, number, scale] = cell.textContent.replace(/,/g, "").match(/^([+-]?[\d.]+(?:e[+-]?\d+)?) ?([KM]?)/) ?? [];
  return number === undefined ? cell.textContent : parseFloat(number) * (SCALES[scale] ?? 1);
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((first, second) => {
        const [a, b] = [first, second].map(row => value(row.cells[column]));
        const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// Each command gets a button that copies it. The text stays selected, so keys copy it where a page may not.
for (const place of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(place.querySelector("pre"));
    button.textContent = document.execCommand("copy") ? "Copied" : "Ctrl+C copies";
  });
  place.append(button);
}
