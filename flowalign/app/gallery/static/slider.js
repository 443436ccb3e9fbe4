"use strict";
// One slider for the pictures of all prompts: what a line of models makes of them, such as a LoRA at several strengths.

(() => {
  const { data, element, text, number } = gallery;

  const interval = ([, low, high]) => (low === null || high === null ? "–" : `${number(low)} to ${number(high)}`);
  const source = (name) => "pictures/" + name;

  gallery.views.slider = (main, settings) => {
    let chosen = data.sliders[settings.of] ? Number(settings.of) : 0;
    const body = element("div");
    if (data.sliders.length > 1) {
      main.append(element("div", { class: "controls" }, gallery.select("Folder", data.sliders.map((slider, i) => [i, data.runs[slider.run].name]), chosen,
        (value) => { chosen = Number(value); draw(); })));
    }
    main.append(body);

    function draw(start) {
      const { title, prompts, positions } = data.sliders[chosen], names = Object.keys(positions[0].figures);
      // a strength of 1 is the run as it was trained
      const whole = positions.findIndex(({ label }) => label === "1");
      let at = positions[start] ? Number(start) : Math.max(whole, 0);
      const input = element("input", { type: "range", id: "position", min: 0, max: positions.length - 1, step: 1, value: at, oninput: () => show(Number(input.value)) });
      const told = element("output", { for: "position" });
      const cells = prompts.map((prompt) => ({ prompt, place: element("div") }));
      const rows = names.map((name) => {
        const mean = element("td"), ends = element("td");
        return { name, mean, ends, row: element("tr", {}, element("th", { scope: "row" }, text(name)), mean, ends) };
      });
      // one picture element for each position, so that none is loaded while the slider moves
      const pictures = cells.map(({ prompt }, i) => positions.map(({ label, pictures: names }) => {
        const alt = `${title} ${label}: ${gallery.shortened(prompt)}`;
        return names[i] ? gallery.image(source(names[i]), alt) : element("div", { class: "missing" }, "no picture");
      }));
      function show(position) {
        at = position;
        const { label, figures } = positions[at];
        gallery.remember("slider", { of: chosen, at });
        input.setAttribute("aria-valuetext", label);
        told.textContent = label;
        cells.forEach(({ place }, i) => place.replaceChildren(pictures[i][at]));
        for (const { name, mean, ends } of rows) {
          const figure = figures[name] ?? [null, null, null];
          mean.textContent = number(figure[0]);
          ends.textContent = interval(figure);
        }
      }
      const numeric = positions.every(({ label }) => label !== "" && Number.isFinite(Number(label)));
      const charts = numeric ? names.map((name) => gallery.chart({ name, over: title, lines: [{ index: 0, name: "", points: positions.flatMap(({ label, figures }) =>
        (figures[name]?.[0] === null || figures[name] === undefined ? [] : [[Number(label), ...figures[name].filter((end) => end !== null)]])) }],
        open: ({ over }) => { input.value = positions.findIndex(({ label }) => Number(label) === over); show(Number(input.value)); } })) : [];
      body.replaceChildren(element("div", { class: "position" }, element("label", { for: "position" }, text(title), ": "), told, input),
        element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Figures at this position" }, element("table", {},
          element("thead", {}, element("tr", {}, ["figure", "mean", "95% interval"].map((word) => element("th", { scope: "col" }, word)))),
          element("tbody", {}, rows.map(({ row }) => row)))),
        element("p", { class: "hint" }, "Means over all held-out prompts; the intervals, bars in the charts, say how far other prompts would move them. Diversity: the mean distance of a prompt's pictures."),
        element("ul", { class: "members" }, cells.map(({ prompt, place }) => element("li", {}, place, text(gallery.shortened(prompt))))),
        element("div", { class: "charts" }, charts));
      show(at);
    }
    draw(settings.at);
  };
})();
