"use strict";
// Every metric of every run over the iterations. A click on a point opens the samples of that moment.

gallery.views.curves = (main, settings) => {
  const { data, element, svg, text, number } = gallery;
  const WIDTH = 420, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;
  const first = [
    [/^reward\/mean$/, "trained reward"], [/^held-out (all\/(?!pictures)|preference)/, "held-out"], [/panel/, "panel"], [/kl/, "KL"],
    [/diversity|duplicate/, "diversity"], [/^preference\//, "preference"], [/clip_fraction/, "clip fraction"], [/ratio/, "ratio"], [/gradient_norm/, "gradient norm"],
    [/^reward\//, "reward"], [/^held-out /, "held-out"],
  ];
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !/\/pictures$/.test(name));
  const place = (name) => { const i = first.findIndex(([pattern]) => pattern.test(name)); return i < 0 ? first.length : i; };
  names.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  if (!names.length) {
    main.append(element("p", { class: "empty" }, "No metrics yet."));
    return;
  }
  const input = element("input", { type: "search", value: settings.text ?? "", placeholder: "contains …", oninput: () => draw() });
  const all = element("input", { type: "checkbox", checked: settings.all === "1", onchange: () => draw() });
  // six colours, and beyond six runs dashes
  const look = (index) => `line-${index % 6} dash-${Math.floor(index / 6) % 4}`;
  const swatch = (index) => svg("svg", { class: "swatch", viewBox: "0 0 24 6", "aria-hidden": "true" }, svg("line", { class: `line ${look(index)}`, x1: 0, x2: 24, y1: 3, y2: 3 }));
  const legend = data.runs.length > 1
    ? element("ul", { class: "legend" }, data.runs.map((run, i) => element("li", {}, swatch(i), text(run.name)))) : null;
  const charts = element("div", { class: "charts" });
  main.append(
    element("form", { class: "controls", onsubmit: (event) => event.preventDefault(), "aria-label": "Choose curves" },
      element("label", {}, "Metric", input), element("label", { class: "check" }, all, "all metrics")),
    ...(legend ? [legend] : []),
    element("p", { class: "hint" }, "Click a point, or focus a chart, move with the arrow keys and press Enter, to see the samples nearest to that iteration."),
    charts);

  // with as few digits as tell them apart
  function ticks(values) {
    for (let digits = 3; ; digits++) {
      const words = values.map((v) => (v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits)))));
      if (new Set(words).size === values.length || digits === 15) return words;
    }
  }

  function chart([name, ...same]) {
    const lines = data.runs.map((run, index) => ({ run, index, points: run.series[name] ?? [] })).filter((line) => line.points.length);
    const points = lines.flatMap((line) => line.points.map(([iteration, value]) => ({ iteration, value, run: line.index })));
    points.sort((a, b) => a.iteration - b.iteration || a.run - b.run);
    const range = (of) => points.reduce(([low, high], p) => [Math.min(low, of(p)), Math.max(high, of(p))], [Infinity, -Infinity]);
    const [start, end] = range((p) => p.iteration), [low, high] = range((p) => p.value);
    const x = (i) => LEFT + ((i - start) / (end - start || 1)) * (WIDTH - LEFT - RIGHT);
    const spread = high - low || Math.abs(high) || 1, bottom = high === low ? low - spread / 2 : low;
    const y = (v) => TOP + (1 - (v - bottom) / spread) * (HEIGHT - TOP - BOTTOM);
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: "0", role: "slider", "aria-label": name,
      "aria-valuemin": start, "aria-valuemax": end, "aria-valuenow": end });
    const levels = [0, 0.5, 1].map((share) => bottom + share * spread), words = ticks(levels);
    for (const [i, value] of levels.entries()) {
      picture.append(svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, words[i]));
    }
    for (const i of new Set([start, end])) {
      picture.append(svg("text", { class: "tick", x: x(i), y: HEIGHT - 8, "text-anchor": i === start ? "start" : "end" }, String(i)));
    }
    for (const { iteration } of gallery.warned) {
      if (iteration >= start && iteration <= end) {
        picture.append(svg("line", { class: "alarm", x1: x(iteration), x2: x(iteration), y1: TOP, y2: HEIGHT - BOTTOM }),
          svg("text", { class: "alarm", x: x(iteration), y: TOP + 10, "text-anchor": "middle" }, "⚠"));
      }
    }
    for (const line of lines) {
      picture.append(svg("polyline", { class: `line ${look(line.index)}`, points: line.points.map(([i, v]) => `${x(i)},${y(v)}`).join(" ") }));
      if (line.points.length <= 60) {
        for (const [i, v] of line.points) picture.append(svg("circle", { class: `dot line-${line.index % 6}`, cx: x(i), cy: y(v), r: 2.5 }));
      }
    }
    const mark = svg("circle", { class: "mark", r: 5, visibility: "hidden" });
    picture.append(mark);
    const readout = element("span", { class: "readout" }, number(points.at(-1).value));
    let at = points.length - 1;
    function choose(index) {
      at = Math.min(points.length - 1, Math.max(0, index));
      const point = points[at];
      mark.setAttribute("cx", x(point.iteration));
      mark.setAttribute("cy", y(point.value));
      mark.setAttribute("visibility", "visible");
      const words = `${number(point.value)} at iteration ${point.iteration}${data.runs.length > 1 ? `, ${data.runs[point.run].name}` : ""}`;
      readout.replaceChildren(text(words));
      picture.setAttribute("aria-valuenow", point.iteration);
      picture.setAttribute("aria-valuetext", words);
    }
    function under(event) {
      const box = picture.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * WIDTH, py = ((event.clientY - box.top) / box.height) * HEIGHT;
      const far = (p) => (x(p.iteration) - px) ** 2 + 0.2 * (y(p.value) - py) ** 2;
      return points.reduce((best, p, i) => (far(p) < far(points[best]) ? i : best), 0);
    }
    function open() {
      const column = gallery.nearest(data.runs[points[at].run], points[at].iteration);
      if (column) gallery.go("grid", { at: column.index });
      else readout.textContent = "this run has saved no pictures yet";
    }
    picture.addEventListener("pointermove", (event) => choose(under(event)));
    picture.addEventListener("click", (event) => { choose(under(event)); open(); });
    picture.addEventListener("focus", () => choose(at));
    picture.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
      if (event.key in steps) { event.preventDefault(); choose(at + steps[event.key]); }
      else if (event.key === "Enter") open();
    });
    return element("figure", { class: "chart" }, element("figcaption", {}, element("span", {}, text(name, { class: "metric" }), same.length ? element("span", { class: "same" }, "the same: ", text(same.join(", "))) : null), readout), picture);
  }

  // metrics whose curves are the same and move, which one chart shows
  function together(names) {
    const curves = new Map();
    for (const name of names) {
      const series = data.runs.map((run) => run.series[name] ?? []);
      const moves = series.some((points) => points.some(([, value]) => value !== points[0][1]));
      const key = moves ? JSON.stringify(series) : name;
      curves.set(key, [...(curves.get(key) ?? []), name]);
    }
    return [...curves.values()];
  }

  function draw() {
    const wanted = input.value.trim().toLowerCase();
    const some = names.filter((name) => place(name) < 9);
    const kept = (wanted || all.checked || !some.length ? names : some).filter((name) => name.toLowerCase().includes(wanted));
    gallery.remember("curves", { ...(input.value ? { text: input.value } : {}), ...(all.checked ? { all: "1" } : {}) });
    charts.replaceChildren(...together(kept).map(chart));
    if (!kept.length) charts.append(element("p", { class: "empty" }, "No metric has this in its name."));
  }
  draw();
};
