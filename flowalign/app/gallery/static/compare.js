"use strict";
// Two moments of one prompt and seed: side by side, under a slider, or blinking.

gallery.views.compare = (main, settings) => {
  const { element, text, number, signed, rows, columns, data } = gallery;
  if (!columns.length) {
    main.append(element("p", { class: "empty" }, "No pictures yet."));
    return;
  }
  const order = gallery.order?.length ? gallery.order : gallery.improved(rows);
  const place = Math.max(0, order.findIndex((row) => String(row.index) === settings.row));
  const column = (value, otherwise) => (columns[value] ? Number(value) : otherwise);
  const now = {
    place, mode: !data.texts.length && ["slider", "blink"].includes(settings.mode) ? settings.mode : "side",
    a: column(settings.a, 0), b: column(settings.b, columns.length - 1), share: 50, second: false,
    running: !matchMedia("(prefers-reduced-motion: reduce)").matches,
  };
  const names = columns.map((c) => [c.index, c.label]);
  const stage = element("div", { class: "stage" });
  const about = element("div", { class: "about" });
  const position = element("span", { class: "count", role: "status" });
  // texts do not lie on each other
  const modes = data.texts.length ? { side: "Side by side" } : { side: "Side by side", slider: "Slider", blink: "Blink" };
  const buttons = Object.entries(modes).map(([mode, name], i) =>
    element("button", { type: "button", "data-mode": mode, onclick: () => { now.mode = mode; draw(); } }, name, " ", element("kbd", {}, i + 1)));
  main.append(
    element("div", { class: "controls" },
      gallery.select("A", names, now.a, (value) => { now.a = Number(value); draw(); }),
      gallery.select("B", names, now.b, (value) => { now.b = Number(value); draw(); })),
    element("div", { class: "bar", role: "group", "aria-label": "How to compare" }, buttons,
      element("button", { type: "button", onclick: () => step(-1) }, "Previous ", element("kbd", {}, "←")),
      element("button", { type: "button", onclick: () => step(1) }, "Next ", element("kbd", {}, "→")),
      element("button", { type: "button", onclick: swap }, "Swap ", element("kbd", {}, "s")), position),
    element("div", { class: "views" }, stage, about));

  function step(by) {
    now.place = (now.place + by + order.length) % order.length;
    draw();
  }
  function swap() {
    [now.a, now.b] = [now.b, now.a];
    const [a, b] = main.querySelectorAll("select");
    a.value = now.a;
    b.value = now.b;
    draw();
  }

  let timer = null;
  function draw() {
    clearInterval(timer);
    timer = null;
    const row = order[now.place], a = row.cells[now.a], b = row.cells[now.b];
    gallery.remember("compare", { row: row.index, a: now.a, b: now.b, mode: now.mode });
    position.textContent = `${now.place + 1} of ${order.length}`;
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.mode === now.mode);
    const view = (picture) => (picture ? gallery.full(picture) : element("p", { class: "missing" }, data.texts.length ? "no text of this prompt and seed" : "no picture of this prompt and seed"));
    if (now.mode === "side" || !a || !b) {
      stage.replaceChildren(element("div", { class: "pair" },
        [["A", now.a, a], ["B", now.b, b]].map(([side, c, picture]) =>
          element("figure", {}, element("figcaption", { class: "side" }, side + ": ", text(columns[c].label)), view(picture)))));
    } else if (now.mode === "slider") {
      const top = view(b), edge = element("span", { class: "edge" });
      const range = element("input", { type: "range", class: "slide", min: 0, max: 100, value: now.share,
        "aria-label": "Share of the picture that shows A", oninput: () => { now.share = Number(range.value); cut(); } });
      const cut = () => { top.style.clipPath = `inset(0 0 0 ${now.share}%)`; edge.style.left = `calc(${now.share}% - 1px)`; };
      const stack = element("div", { class: "stack" }, view(a), top, edge);
      const drag = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const box = stack.getBoundingClientRect();
        range.value = now.share = Math.min(100, Math.max(0, (100 * (event.clientX - box.left)) / box.width));
        cut();
        event.preventDefault();
      };
      stack.addEventListener("pointerdown", drag);
      stack.addEventListener("pointermove", drag);
      stack.style.touchAction = "pan-y";
      shape(stack, a);
      cut();
      stage.replaceChildren(element("p", { class: "side" }, "left A: ", text(columns[now.a].label), " · right B: ", text(columns[now.b].label)), stack, range);
    } else {
      const first = view(a), second = view(b), label = element("p", { class: "side" });
      const face = () => {
        second.style.visibility = now.second ? "visible" : "hidden";
        first.style.visibility = now.second ? "hidden" : "visible";
        label.replaceChildren(now.second ? "B: " : "A: ", text(columns[now.second ? now.b : now.a].label));
      };
      // well below three flashes a second
      const run = () => { clearInterval(timer); timer = now.running ? setInterval(() => { now.second = !now.second; face(); }, 800) : null; };
      const pause = element("button", { type: "button", onclick: () => { now.running = !now.running; pause.firstChild.data = now.running ? "Pause " : "Blink "; run(); } },
        now.running ? "Pause " : "Blink ", element("kbd", {}, "p"));
      const turn = element("button", { type: "button", onclick: () => { now.second = !now.second; face(); } }, "Switch ", element("kbd", {}, "space"));
      const stack = element("div", { class: "stack" }, first, second);
      shape(stack, a);
      stage.replaceChildren(label, stack, element("div", { class: "bar" }, turn, pause));
      now.press = { turn, pause };
      face();
      run();
    }
    describe(row, a, b);
  }
  const shape = (stack, picture) => { if (picture.width) stack.style.setProperty("--aspect", picture.width / picture.height); };

  function describe(row, a, b) {
    const known = data.scores.map((name, i) => [name, gallery.score(a, i), gallery.score(b, i)]).filter(([, x, y]) => x !== null || y !== null);
    const change = (x, y) => (x === null || y === null ? null : y - x);
    // of a statistic neither more nor less is better
    const statistic = (name) => name.startsWith("statistics/"), title = (name) => (statistic(name) ? name.slice(11).replaceAll("_", " ") : name);
    const sign = (name, x, y) => (statistic(name) || !change(x, y) ? "" : change(x, y) > 0 ? "up" : "down");
    const facts = Object.entries(row.metadata);
    const written = [["A", a], ["B", b]].flatMap(([side, picture]) => Object.entries(picture?.replies ?? {}).map((reply) => [side, ...reply]));
    const became = [["A", a], ["B", b]].filter(([, picture]) => picture?.rewritten);
    about.replaceChildren(
      element("h2", {}, "Prompt"), text(row.prompt, { class: "prompt" }),
      ...became.flatMap(([side, picture]) => [element("h2", {}, `What the rewriter made of it (${side})`), text(picture.rewritten, { class: "prompt" })]),
      element("p", { class: "seed" }, "seed ", text(row.seed), facts.map(([key, value]) => [" · ", text(key), ": ", text(value)]).flat()),
      element("div", { class: "wide" }, element("table", {},
        element("thead", {}, element("tr", {}, ["score", "A", "B", "B − A"].map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, known.map(([name, x, y]) => element("tr", {}, element("th", { scope: "row" }, text(title(name))), element("td", {}, number(x)),
          element("td", {}, number(y)), element("td", { class: sign(name, x, y) }, signed(change(x, y)))))))),
      ...written.flatMap(([side, name, reply]) => [element("h2", {}, `What the judge wrote about ${side}: `, text(name)), text(reply, { class: "reply" })]));
  }

  const mode = (name) => () => { if (modes[name]) { now.mode = name; draw(); } };
  const off = gallery.keys({
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), 1: mode("side"), 2: mode("slider"), 3: mode("blink"), s: swap,
    " ": () => now.mode === "blink" && now.press.turn.click(), p: () => now.mode === "blink" && now.press.pause.click(),
    Escape: () => history.back(),
  });
  draw();
  return () => { off(); clearInterval(timer); };
};
