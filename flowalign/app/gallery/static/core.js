"use strict";
// What all views share: the page's data, making elements, numbers as text, and going from view to view.
// Text reaches the page through textContent and attributes only, so nothing in a prompt or a file name is run.

const gallery = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }

  function svg(name, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // a prompt or a name of any direction, set apart from the text around it
  const text = (value, attributes = {}) => element("bdi", { dir: "auto", ...attributes }, value);

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(2);
    return String(Number(value.toFixed(3)));
  };
  const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value).replace("-", "−"));

  const pictures = data.pictures.map(([row, column, name, width, height, rewritten, values], index) => ({
    row, column, name, width, height, values, text: data.texts[index] ?? null, replies: data.replies[index] ?? {},
    rewritten: rewritten < 0 ? null : data.rewritten[rewritten],
  }));
  const rows = data.rows.map(([prompt, seed, metadata], index) => ({
    index, seed, metadata, prompt: data.prompts[prompt], category: metadata.category ?? "", cells: new Array(data.columns.length),
  }));
  for (const picture of pictures) rows[picture.row].cells[picture.column] = picture;
  // a search beside a run has no moments, and the run needs no name then
  const several = new Set(data.columns.map(([run]) => run)).size > 1;
  const columns = data.columns.map(([run, iteration], index) => ({
    index, run, iteration, base: data.columns.findIndex(([r]) => r === run),
    label: (several ? data.runs[run].name + " · " : "") + (iteration === 0 ? "base" : "iteration " + iteration),
  }));

  const score = (picture, index) => picture?.values[index] ?? null;
  function gain(row, column, index) {
    const after = score(row.cells[column], index), before = score(row.cells[columns[column].base], index);
    return after === null || before === null ? null : after - before;
  }
  // the largest gain first, among rows with pictures at every moment, then among the others; rows without a gain come last
  const most = Math.max(0, data.scores.indexOf("reward"));
  function improved(list, column = columns.length - 1, index = most, sign = -1) {
    const key = new Map(list.map((row) => [row, { gain: gain(row, column, index), whole: !row.cells.includes(undefined) }]));
    return list.toSorted((a, b) => {
      const [x, y] = [key.get(a), key.get(b)];
      return (x.gain === null) - (y.gain === null) || y.whole - x.whole || sign * (x.gain - y.gain) || a.index - b.index;
    });
  }

  const clip = (picture) => /\.(mp4|webm)$/.test(picture.name);
  const address = (picture) => "pictures/" + picture.name;
  const thumbnail = (picture) =>
    Math.max(picture.width, picture.height) > data.thumbnail ? "thumbnails/" + picture.name + ".jpg" : address(picture);
  const shortened = (words) => (words.length > 150 ? words.slice(0, 150) + "…" : words);

  // small pictures keep their pixels sharp when enlarged
  const small = (width, height) => Math.max(width, height) <= 128;
  // a picture, a clip or a sound
  function image(source, alt, attributes = {}) {
    if (/\.wav$/.test(source)) return element("audio", { src: source, "aria-label": alt, controls: true, preload: "metadata" });
    if (/\.(mp4|webm)$/.test(source)) {
      const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      const clip = element("video", { src: source, "aria-label": alt, loop: true, playsinline: true, preload: "metadata", autoplay: !still, ...attributes });
      // the attribute counts only where a page is parsed, and browsers do not start clips with sound
      clip.muted = true;
      return clip;
    }
    const sharpen = () => view.classList.toggle("pixels", small(view.naturalWidth, view.naturalHeight));
    const view = element("img", { src: source, alt, decoding: "async", onload: sharpen, ...attributes });
    return view;
  }
  // what a language model wrote, of any direction and length; an empty text says so
  const written = (words, attributes = {}) => element("div", { ...attributes, class: "written " + (attributes.class ?? "") },
    words === "" ? element("span", { class: "hint" }, "(empty)") : text(words));
  function full(picture) {
    if (picture.text !== null) return written(picture.text, { tabindex: "0", role: "region", "aria-label": columns[picture.column].label });
    const row = rows[picture.row];
    const alt = `${columns[picture.column].label}: ${shortened(row.prompt)}`;
    return image(address(picture), alt, clip(picture) ? { controls: true } : {});
  }

  // a command line with a button that copies it, or selects it where the browser lends no clipboard (a page from disk)
  function command(words) {
    const line = element("code", { tabindex: "0", role: "region", "aria-label": `Command: ${words}` }, words);
    const button = element("button", { type: "button", onclick: async () => {
      getSelection().selectAllChildren(line);
      if (navigator.clipboard) await navigator.clipboard.writeText(words).then(() => { button.textContent = "Copied"; }, () => {});
    } }, "Copy");
    return element("div", { class: "command" }, line, button);
  }

  function select(label, options, value, change, attributes = {}) {
    const list = element("select", { onchange: () => change(list.value), ...attributes },
      options.map(([key, name]) => element("option", { value: key, selected: String(key) === String(value) }, name)));
    return element("label", {}, label, list);
  }

  // The address after # holds the view and its settings, so that back, reload and links work.
  const views = {};
  let leave = null;
  // pairs that were sampled for votes have nothing else to see
  const ballot = columns.length === 1 && !data.scores.length && document.querySelector("nav a[href='#vote']");
  const home = (ballot || document.querySelector("nav a")).hash.slice(1);
  function state() {
    const [name, query] = location.hash.slice(1).split("?");
    return [views[name] ? name : home, Object.fromEntries(new URLSearchParams(query))];
  }
  const link = (name, settings = {}) => "#" + name + (Object.keys(settings).length ? "?" + new URLSearchParams(settings) : "");
  const go = (name, settings) => { location.hash = link(name, settings); };
  const remember = (name, settings) => history.replaceState(null, "", link(name, settings));

  function show() {
    if (location.hash === "#main") return document.getElementById("main").focus();
    const [name, settings] = state();
    if (leave) leave();
    leave = null;
    for (const anchor of document.querySelectorAll("nav a")) {
      if (anchor.hash === "#" + name) anchor.setAttribute("aria-current", "page");
      else anchor.removeAttribute("aria-current");
    }
    const main = document.getElementById("main");
    main.replaceChildren();
    main.className = name;
    scrollTo(0, 0);
    leave = views[name](main, settings) ?? null;
  }

  // keys of a view; typing into fields and browser shortcuts are left alone
  function keys(actions) {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (event.key === " " && event.target.closest("button, a, summary, video")) return;
      const action = actions[event.key];
      if (action) { event.preventDefault(); action(); }
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }

  // the saved moment of a run that is nearest to an iteration
  function nearest(run, iteration) {
    const own = columns.filter((column) => data.runs[column.run] === run);
    return own.reduce((best, column) => (best === null || Math.abs(column.iteration - iteration) < Math.abs(best.iteration - iteration) ? column : best), null);
  }

  const warned = data.runs.flatMap((run) => run.warnings.map(([iteration, watch, words]) => ({ run, iteration, watch, words })));
  function warnings() {
    if (!warned.length) return;
    const line = ({ run, iteration, watch, words }) => {
      const column = nearest(run, iteration);
      return [watch ? element("strong", {}, watch + " ") : null, data.runs.length > 1 ? text(run.name) : null, ` iteration ${iteration}: `, text(words), " ",
        column ? element("a", { href: link("grid", { at: column.index }) }, "pictures") : null];
    };
    const worst = warned.findLast((entry) => entry.watch === "hacked") ?? warned.at(-1);
    document.getElementById("warnings").append(element("details", { class: "warnings" },
      element("summary", {}, "⚠ ", `${warned.length} ${warned.length === 1 ? "warning" : "warnings"} of reward hacking: `, text(shortened(worst.words))),
      element("ul", {}, warned.map((entry) => element("li", {}, line(entry))))));
  }

  function notes() {
    const lines = data.runs.flatMap((run) => run.notes.map((note) => element("li", {}, text(run.name), ": ", text(note))));
    if (lines.length) {
      document.getElementById("notes").append(
        element("details", {}, element("summary", {}, `${lines.length} ${lines.length === 1 ? "note" : "notes"} on what is not shown`), element("ul", {}, lines)));
    }
  }

  return { data, element, svg, text, number, signed, rows, columns, several, score, gain, improved, clip, thumbnail, shortened, small, image, written, full, select, command, views, go, link, remember, show, keys, nearest, warned, warnings, notes };
})();
