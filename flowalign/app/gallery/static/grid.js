"use strict";
// Prompts down, moments across, one seed in a row. Only what is on the screen is in the document.

gallery.views.grid = (main, settings) => {
  const { element, text, number, signed, rows, columns, data } = gallery;
  if (!columns.length) {
    main.append(element("p", { class: "empty" }, "No pictures yet. They appear here after the run's first evaluation; the curves may already be there."));
    return;
  }
  const CAPTION = 40, CELL_TEXT = 24, GAP = 8, MARGIN = 2;
  const names = gallery.several ? "head named" : "head";
  // set by measure(): pixels of the room, a picture, a column, a row and a lane; rows with few columns stand in several lanes
  let room, side, width, height, lane, lanes;
  // whether the base's column stays in sight while the others scroll
  let pinned = false;
  const number_of = Object.fromEntries(data.scores.map((name, i) => [name, i]));
  const chosen = {
    text: "", category: "", score: data.scores.includes("reward") ? "reward" : data.scores[0] ?? "",
    at: String(columns.length - 1), sort: columns.at(-1).base === columns.length - 1 ? "prompts" : "improved", low: "", high: "", gain: "", ...settings,
  };
  if (!columns[chosen.at]) chosen.at = String(columns.length - 1);
  let shown = [], focus = { row: 0, column: 0 };

  const categories = [...new Set(rows.map((row) => row.category).filter(Boolean))].sort();
  const field = (label, key, attributes) => {
    const input = element("input", { value: chosen[key], oninput: () => { chosen[key] = input.value; update(); }, ...attributes });
    return element("label", {}, label, input);
  };
  const choose = (key) => (value) => { chosen[key] = value; update(); };
  const controls = element("form", { class: "controls", onsubmit: (event) => event.preventDefault(), "aria-label": "Sort and filter" },
    field(data.texts.length ? "Prompt or text" : "Prompt", "text", { type: "search", placeholder: "contains …" }),
    categories.length ? gallery.select("Category", [["", "all"], ...categories.map((c) => [c, c])], chosen.category, choose("category")) : null,
    data.scores.length > 1 ? gallery.select("Score", data.scores.map((s) => [s, s]), chosen.score, choose("score")) : null,
    gallery.select("Judged at", columns.map((c) => [c.index, c.label]), chosen.at, choose("at")),
    gallery.select("Order", [["prompts", "as sampled"], ["text", "prompt, A to Z"], ["best", "best"], ["worst", "worst"],
      ["improved", "most improved"], ["damaged", "most damaged"]], chosen.sort, choose("sort")),
    data.scores.length ? element("details", { class: "more", open: Boolean(chosen.low || chosen.high || chosen.gain) }, element("summary", {}, "Filter by score"),
      element("div", {}, field("Score from", "low", { type: "number", step: "any" }), field("to", "high", { type: "number", step: "any" }),
        field("Gain from", "gain", { type: "number", step: "any" }))) : null);
  const count = element("p", { class: "count", role: "status" });
  const head = element("div", { class: names, "aria-hidden": "true" });
  const body = element("div", { class: "cells", role: "grid", "aria-label": (data.texts.length ? "Texts" : "Pictures") + ": arrow keys move, Enter compares with the base" });
  const scroller = element("div", { class: "scroller" }, body);
  main.append(controls, count, element("div", { class: "heads" }, head), scroller);
  body.setAttribute("aria-colcount", columns.length);

  function measure() {
    room = scroller.clientWidth;
    // as many lanes as leave their pictures large enough, and pictures that fill them, as large as thumbnails at most
    const narrow = innerWidth < 600, fitting = (lanes) => Math.floor(((room + GAP * 2) / lanes - GAP) / columns.length) - GAP;
    lanes = 1;
    const least = narrow ? 104 : 128;
    while (lanes < shown.length && fitting(lanes + 1) >= least) lanes++;
    side = Math.min(data.thumbnail, fitting(lanes));
    // columns that do not all fit: as many as do, whole
    const overflow = lanes === 1 && side < least;
    if (overflow) side = (room + GAP) / Math.max(2, Math.floor((room + GAP) / (least + GAP))) - GAP;
    width = side + GAP;
    height = CAPTION + side + CELL_TEXT + GAP * 2;
    lane = columns.length * width + GAP;
    pinned = overflow && !gallery.several;
    body.style.width = (lanes > 1 ? room : columns.length * width - GAP) + "px";
    body.style.height = Math.ceil(shown.length / lanes) * height + "px";
    head.replaceChildren(...Array.from({ length: Math.min(lanes, shown.length) }, (_, i) => columns.map((column) => {
      const alarm = gallery.warned.filter(({ run, iteration }) => run === data.runs[column.run] && iteration === column.iteration).map(({ words }) => words);
      const name = element("span", { class: column.index === Number(chosen.at) ? "at" : "", title: [column.label, ...alarm].join(": ") },
        alarm.length ? "⚠ " : null, text(column.label));
      name.style.left = i * lane + column.index * width + "px";
      name.style.width = side + "px";
      name.classList.toggle("pinned", pinned && column.index === 0);
      return name;
    })).flat());
  }

  function filter() {
    const index = number_of[chosen.score], at = Number(chosen.at);
    const wanted = chosen.text.trim().toLowerCase();
    const value = (row) => gallery.score(row.cells[at], index), gained = (row) => gallery.gain(row, at, index);
    const limit = (key) => (chosen[key] === "" || Number.isNaN(Number(chosen[key])) ? null : Number(chosen[key]));
    const low = limit("low"), high = limit("high"), least = limit("gain");
    const within = (v, from, to) => (from === null && to === null) || (v !== null && (from === null || v >= from) && (to === null || v <= to));
    shown = rows.filter((row) =>
      (!wanted || (row.prompt + "\n" + (row.cells[at]?.text ?? "")).toLowerCase().includes(wanted)) && (!chosen.category || row.category === chosen.category) &&
      within(value(row), low, high) && within(gained(row), least, null));
    // rows without the number that decides come last
    const by = (of, sign) => (a, b) => (of(a) === null) - (of(b) === null) || sign * (of(a) - of(b)) || a.index - b.index;
    const orders = {
      text: (a, b) => a.prompt.localeCompare(b.prompt), best: by(value, -1), worst: by(value, 1),
    };
    if (orders[chosen.sort]) shown.sort(orders[chosen.sort]);
    else if (chosen.sort !== "prompts") shown = gallery.improved(shown, at, index, chosen.sort === "damaged" ? 1 : -1);
    // what compare steps through
    gallery.order = shown;
  }

  function cell(row, column, position) {
    const picture = row.cells[column], index = number_of[chosen.score];
    const box = element("div", { class: "cell", role: "gridcell", "aria-colindex": column + 1,
      tabindex: position === focus.row && column === focus.column ? "0" : "-1", "data-row": position, "data-column": column });
    box.style.left = column * width + "px";
    box.style.width = side + "px";
    if (!picture) {
      box.append(element("span", { class: "missing" }, data.texts.length ? "no text" : "no picture"));
      return box;
    }
    const value = gallery.score(picture, index), gained = columns[column].base === column ? null : gallery.gain(row, column, index);
    const words = `${columns[column].label}, ${chosen.score} ${number(value)}${gained === null ? "" : `, gain ${signed(gained)}`}: ${gallery.shortened(row.prompt)}`;
    const view = picture.text === null ? gallery.image(gallery.thumbnail(picture), words, gallery.clip(picture) ? { autoplay: false } : { class: gallery.small(picture.width, picture.height) ? "pixels" : null })
      : gallery.written(gallery.shortened(picture.text), { title: words });
    view.style.height = view.style.width = side + "px";
    if (value === null) box.append(view);
    else box.append(view, element("span", { class: "value" }, number(value),
      gained === null ? null : element("span", { class: gained > 0 ? "up" : gained < 0 ? "down" : "" }, " " + (gained === 0 ? "±0" : signed(gained)))));
    return box;
  }

  // asks the page for its measures once, before it changes anything: each question after a change is a layout of its own
  const drawn = new Map();
  function draw(passing = false) {
    const left = scroller.scrollLeft;
    head.style.transform = `translateX(${-left}px)`;
    if (pinned) head.firstChild.style.transform = `translateX(${left}px)`;
    const top = Math.max(0, -body.getBoundingClientRect().top), view = innerHeight;
    const first = lanes * Math.max(0, Math.floor(top / height) - MARGIN);
    const last = Math.min(shown.length, lanes * (Math.ceil((top + view) / height) + MARGIN + 1)) - 1;
    const from = Math.max(0, Math.floor(left / width) - MARGIN), to = Math.min(columns.length - 1, Math.ceil((left + room) / width) + MARGIN);
    for (const [position, line] of drawn) {
      if (position < first || position > last) { line.node.remove(); drawn.delete(position); }
    }
    for (let position = first; position <= last; position++) {
      const row = shown[position];
      let line = drawn.get(position);
      if (!line) {
        const rewritten = (row.cells[Number(chosen.at)] ?? row.cells.find((picture) => picture))?.rewritten;
        const node = element("div", { class: "row", role: "row", "aria-rowindex": position + 1 },
          element("div", { class: "caption", role: "rowheader", title: row.prompt },
            text(gallery.shortened(row.prompt), { class: "prompt" }),
            element("span", { class: "seed" }, rewritten ? element("span", {}, "became: ", text(gallery.shortened(rewritten)), " ") : null, "seed ", text(row.seed))));
        node.style.top = Math.floor(position / lanes) * height + "px";
        node.style.left = (position % lanes) * lane + "px";
        node.style.width = columns.length * width + "px";
        node.style.height = height + "px";
        node.firstChild.style.width = Math.min(room, columns.length * width) - GAP + "px";
        body.append(node);
        line = { node, cells: new Map() };
        drawn.set(position, line);
      }
      if (passing) continue;
      for (const [column, node] of line.cells) {
        if ((column < from || column > to) && !(pinned && column === 0)) { node.remove(); line.cells.delete(column); }
      }
      for (let column = pinned ? 0 : from; column <= to; column = Math.max(from, column + 1)) {
        if (!line.cells.has(column)) {
          const node = cell(row, column, position);
          line.node.append(node);
          line.cells.set(column, node);
        }
      }
      if (pinned) {
        line.cells.get(0).classList.add("pinned");
        line.cells.get(0).style.transform = `translateX(${left}px)`;
      }
    }
  }

  function clear() {
    for (const line of drawn.values()) line.node.remove();
    drawn.clear();
  }

  function update() {
    filter();
    focus = { row: 0, column: Number(chosen.at) };
    gallery.remember("grid", Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== "")));
    count.textContent = `${shown.length} of ${rows.length} rows (a row is one prompt and seed), ${columns.length} ${columns.length === 1 ? "moment" : "moments"}`;
    body.setAttribute("aria-rowcount", shown.length);
    measure();
    clear();
    draw();
  }

  function open(row, column) {
    const base = columns[column].base, other = base === column ? Number(chosen.at) : base;
    gallery.go("compare", { row: row.index, a: Math.min(column, other), b: Math.max(column, other) });
  }

  function move(down, right) {
    if (!shown.length) return;
    let row = focus.row + down * lanes, column = focus.column + right;
    // over the edge of a lane into the one beside it
    if (lanes > 1 && column === columns.length && row + 1 < shown.length) { row += 1; column = 0; }
    else if (lanes > 1 && column === -1 && row > 0) { row -= 1; column = columns.length - 1; }
    focus = { row: Math.min(shown.length - 1, Math.max(0, row)), column: Math.min(columns.length - 1, Math.max(0, column)) };
    const top = body.getBoundingClientRect().top + Math.floor(focus.row / lanes) * height, sticky = head.offsetHeight;
    if (top < sticky) scrollBy(0, top - sticky - GAP);
    else if (top + height > innerHeight) scrollBy(0, top + height - innerHeight);
    const left = (focus.row % lanes) * lane + focus.column * width, covered = pinned && focus.column ? width : 0;
    if (left - covered < scroller.scrollLeft) scroller.scrollLeft = left - covered;
    else if (left + width > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = left + width - scroller.clientWidth;
    draw();
    for (const node of body.querySelectorAll("[tabindex='0']")) node.setAttribute("tabindex", "-1");
    const node = drawn.get(focus.row)?.cells.get(focus.column);
    node?.setAttribute("tabindex", "0");
    node?.focus({ preventScroll: true });
  }

  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(innerHeight / height) - 1);
    const moves = {
      ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1], PageDown: [page, 0], PageUp: [-page, 0],
      Home: event.ctrlKey ? [-Infinity, 0] : [0, -Infinity], End: event.ctrlKey ? [Infinity, 0] : [0, Infinity],
    };
    if (moves[event.key]) { event.preventDefault(); move(...moves[event.key]); }
    else if (event.key === "Enter" && shown[focus.row]) open(shown[focus.row], focus.column);
  });
  body.addEventListener("focusin", (event) => {
    const box = event.target.closest(".cell");
    if (box) focus = { row: Number(box.dataset.row), column: Number(box.dataset.column) };
  });
  body.addEventListener("click", (event) => {
    const box = event.target.closest(".cell");
    if (box) open(shown[box.dataset.row], Number(box.dataset.column));
  });

  let waiting = false, before = 0;
  const soon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      // rows that fly past, a screen or more in a frame, get their captions; their pictures come where the page rests
      const passing = Math.abs(scrollY - before) >= innerHeight;
      before = scrollY;
      draw(passing);
      if (passing) setTimeout(soon, 100);
    });
  };
  const again = () => { measure(); clear(); soon(); };
  addEventListener("scroll", soon, { passive: true });
  scroller.addEventListener("scroll", soon, { passive: true });
  addEventListener("resize", again);
  update();
  scroller.scrollLeft = Math.max(0, (Number(chosen.at) + 1) * width - GAP - scroller.clientWidth);
  return () => { removeEventListener("scroll", soon); removeEventListener("resize", again); };
};
