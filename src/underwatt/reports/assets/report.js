"use strict";
// Draws the figures in the colours of the page, again when these change, and makes the table of measurements sortable.
(function () {
  const NARROW = 560;
  const root = document.documentElement;
  const drawings = JSON.parse(document.getElementById("drawings").textContent);
  const config = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false };

  function coloured(value, style) {
    if (typeof value === "string") {
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) {
      return value.map((item) => (typeof item === "number" ? item : coloured(item, style)));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  }

  function fitted(layout, width) {
    if (width >= NARROW) return layout;
    layout.font.size = 11;
    layout.margin = Object.assign({}, layout.margin, { r: Math.min(layout.margin.r, 8) });
    for (const label of layout.annotations || []) {
      if (!label.name) continue;
      label.text = label.name;
      if (label.showarrow) Object.assign(label, { ax: 0, ay: label.name === "choice" ? 20 : -15, xanchor: "center", arrowcolor: "rgba(0,0,0,0)" });
    }
    return layout;
  }

  function draw(id) {
    const place = document.getElementById(id);
    const figure = coloured(drawings[id], getComputedStyle(root));
    const layout = fitted(figure.layout, place.clientWidth);
    layout.width = place.clientWidth;
    return Plotly.react(place, figure.data, layout, config);
  }

  function onScreen(id) {
    const box = document.getElementById(id).getBoundingClientRect();
    return box.top < innerHeight && box.bottom > 0;
  }

  async function drawAll() {
    const ids = Object.keys(drawings);
    for (const id of ids.filter(onScreen)) await draw(id);
    performance.mark("shown");
    for (const id of ids.filter((id) => !onScreen(id))) {
      await new Promise((done) => setTimeout(done));  // let the reader scroll between two figures
      await draw(id);
    }
    performance.mark("drawn");
    root.dataset.drawn = "true";
  }

  let waiting = null;
  function redraw() {
    clearTimeout(waiting);
    root.dataset.drawn = "false";
    waiting = setTimeout(drawAll, 80);
  }

  function sortable(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    const body = table.tBodies[0];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = Array.from(body.rows, (row) => {
          const text = row.cells[column].textContent;
          return { row, text, number: parseFloat(text.replace(/,/g, "")) };
        });
        rows.sort((a, b) => {
          const known = Number.isNaN(a.number) - Number.isNaN(b.number);
          if (known) return known;  // what was not measured stays last, either way
          const order = Number.isNaN(a.number) ? a.text.localeCompare(b.text) : a.number - b.number;
          return down ? -order : order;
        });
        body.append(...rows.map((item) => item.row));
      });
    });
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  drawAll();
})();
