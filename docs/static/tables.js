// A table that is wider than its frame may break its words. Where that is not enough, as on a
// telephone, it becomes a list of its rows, each cell under its heading.
const telephone = matchMedia("(max-width: 46em)");

function fit() {
  for (const table of document.querySelectorAll("article .table-wrapper table")) {
    const frame = table.parentElement;
    const overflows = () => frame.scrollWidth > frame.clientWidth + 1;
    table.classList.remove("tight", "tighter", "listed");
    for (const way of telephone.matches ? ["listed"] : ["tight", "tighter", "listed"])
      if (overflows()) table.classList.add(way);
  }
}

const PRINTS = "article .highlight-text pre, article .cell_output .stream pre";

// What a program prints, line by line, so that a telephone may break a line and indent the rest;
// a table of `explain` is scrolled.
function splitPrints() {
  for (const print of document.querySelectorAll(PRINTS)) {
    if (/^parameter  /m.test(print.textContent)) continue;
    const lines = print.textContent.split(/(?<=\n)/).map((text) => {
      const line = document.createElement("span");
      line.textContent = text;
      return line;
    });
    print.replaceChildren(...lines);
    print.classList.add("lines");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  splitPrints();
  for (const table of document.querySelectorAll("article .table-wrapper table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText);
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, i) => {
        cell.dataset.heading = heads[i] || "";
        cell.classList.toggle("empty", !cell.textContent.trim());
      });
  }
  fit();
  addEventListener("resize", fit);
});
