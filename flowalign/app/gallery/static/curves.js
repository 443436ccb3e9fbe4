"use strict";
// Every metric of every run over the iterations. A click on a point opens the samples of that moment.

gallery.views.curves = (main, settings) => {
  const { data, element } = gallery;
  const first = [
    [/^held-out all\/(strict|reward)$/, "held-out score"], [/^reward\/mean$/, "trained reward"],
    [/^held-out (all\/(?!pictures|samples|statistics)|preference)/, "held-out"], [/panel/, "panel"], [/kl/, "KL"],
    [/diversity|duplicate/, "diversity"], [/^preference\//, "preference"], [/clip_fraction/, "clip fraction"], [/ratio/, "ratio"], [/gradient_norm/, "gradient norm"],
    [/^reward\//, "reward"], [/^held-out (?!all\/)/, "held-out by category"], [/^held-out /, "statistics"],
  ];
  const known = {
    "reward/mean": "reward of the training samples", "reward/std": "standard deviation of the reward", "policy/kl": "KL from the start weights",
    "policy/ratio": "probability ratio to the old weights", "policy/gradient_norm": "norm of the gradient", "policy/clip_fraction": "share of clipped steps",
  };
  function label(name) {
    const [, group, score] = name.match(/^held-out ([^/]+)\/(.+)$/) ?? [];
    if (score) return `held-out ${score.replace("statistics/", "").replaceAll("_", " ")}${group === "all" ? "" : ", " + group}`;
    return known[name] ?? name;
  }
  const moves = (name) => data.runs.some((run) => (run.series[name] ?? []).some(([, value]) => value !== run.series[name][0][1]));
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !/\/pictures$/.test(name));
  const place = (name) => { const i = first.findIndex(([pattern]) => pattern.test(name)); return i < 0 ? first.length : i; };
  names.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  if (!names.length) {
    main.append(element("p", { class: "empty" }, "No metrics yet."));
    return;
  }
  const input = element("input", { type: "search", value: settings.text ?? "", placeholder: "contains …", oninput: () => draw() });
  const all = element("input", { type: "checkbox", checked: settings.all === "1", onchange: () => draw() });
  const several = data.runs.filter((run) => Object.keys(run.series).length).length > 1;
  const legend = several ? gallery.legend(data.runs.map((run) => run.name)) : null;
  const charts = element("div", { class: "charts" });
  main.append(
    element("form", { class: "controls", onsubmit: (event) => event.preventDefault(), "aria-label": "Choose curves" },
      element("label", {}, "Metric", input), element("label", { class: "check" }, all, "all metrics")),
    ...(legend ? [legend] : []),
    element("p", { class: "hint" }, "Click a point, or focus a chart, move with the arrow keys and press Enter, to see the samples nearest to that iteration."),
    charts);

  function open({ over, line }) {
    const column = gallery.nearest(data.runs[line.index], over);
    if (!column) return "this run has saved no pictures yet";
    gallery.go("grid", { at: column.index });
  }

  function chart([name, ...same]) {
    const lines = data.runs.map((run, index) => ({ index, name: several ? run.name : "", points: run.series[name] ?? [] }));
    return gallery.chart({ name, label: label(name), same: same.map(label), lines, alarms: gallery.warned.map(({ iteration }) => iteration), open });
  }

  // metrics whose curves are the same and move, which one chart shows
  function together(names) {
    const curves = new Map();
    for (const name of names) {
      const series = data.runs.map((run) => run.series[name] ?? []);
      const key = moves(name) ? JSON.stringify(series) : name;
      curves.set(key, [...(curves.get(key) ?? []), name]);
    }
    return [...curves.values()];
  }

  function draw() {
    const wanted = input.value.trim().toLowerCase();
    const some = names.filter((name) => place(name) < 10 && moves(name));
    const kept = (wanted || all.checked || !some.length ? names : some).filter((name) => `${name}\n${label(name)}`.toLowerCase().includes(wanted));
    gallery.remember("curves", { ...(input.value ? { text: input.value } : {}), ...(all.checked ? { all: "1" } : {}) });
    charts.replaceChildren(...together(kept).map(chart));
    if (!kept.length) charts.append(element("p", { class: "empty" }, "No metric has this in its name."));
  }
  draw();
};
