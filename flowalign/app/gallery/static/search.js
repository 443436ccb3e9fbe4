"use strict";
// Searches of a frozen model: the tree of what was tried, and how good the best was after so many network evaluations.

(() => {
  const { data, element, svg, text, number } = gallery;
  const GAP = 44, CAPTION = 22, SHOWN = 16, LEAST = 56, CHARTS = 60;
  const PARENT = 0, STEP = 1, SCORE = 2, FORWARDS = 3, KEPT = 4;

  const methods = [...new Set(data.searches.map((found) => found.method))];
  // the searches of one prompt of a folder, by one method each
  const prompts = [...Map.groupBy(data.searches, (found) => found.run + " " + found.number).values()];
  const named = (found) => (data.runs.length > 1 ? data.runs[found.run].name + " · " : "") + gallery.shortened(found.prompt);

  // numbers of the nodes that a node came from, itself first
  function line(found, node) {
    const walked = [];
    for (let at = node; at >= 0; at = found.nodes[at][PARENT]) walked.push(at);
    return walked;
  }

  // nodes that were scored together
  function rounds(found) {
    const all = [];
    found.nodes.forEach((node, i) => {
      const last = all.at(-1);
      if (last && found.nodes[last[0]][FORWARDS] === node[FORWARDS] && node[PARENT] < last[0]) last.push(i);
      else all.push([i]);
    });
    return all;
  }
  const ranked = (found, round) => round.toSorted((a, b) => found.nodes[b][SCORE] - found.nodes[a][SCORE] || a - b);

  function tree(found) {
    const best = new Set(line(found, found.best));
    const [width, height] = found.tile.length ? found.tile : [LEAST, 0], scale = Math.max(1, LEAST / width);
    const wide = width * scale, high = height * scale, box = high + CAPTION;
    const sheet = Math.ceil(Math.sqrt(found.places.length)), place = new Map(found.places.map((node, i) => [node, i]));
    const spots = new Map(), columns = [];
    const all = rounds(found).map((round) => ranked(found, round)).map((round) => [round, round.filter((node, i) => i < SHOWN || best.has(node))]);
    for (const [x, [, shown]] of all.entries()) shown.forEach((node, y) => spots.set(node, { x: x * (wide + GAP), y: CAPTION * 2 + y * (box + 8), column: x, row: y }));
    const area = element("div", { class: "area" });
    area.style.width = all.length * (wide + GAP) + "px";
    area.style.height = CAPTION * 3 + Math.max(...all.map(([, shown]) => shown.length)) * (box + 8) + "px";
    const lines = svg("svg", { "aria-hidden": "true" });
    area.append(lines);
    const edges = new Map();
    for (const [node, at] of spots) {
      const from = spots.get(found.nodes[node][PARENT]);
      if (!from) continue;
      const [x1, y1, x2, y2] = [from.x + wide, from.y + high / 2, at.x, at.y + high / 2], middle = (x1 + x2) / 2;
      const edge = svg("path", { class: best.has(node) ? "edge best" : "edge", d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` });
      edges.set(node, edge);
      lines.append(edge);
    }
    const told = element("p", { class: "told", role: "status" });
    const words = (node) => {
      const [parent, step, score, forwards, kept] = found.nodes[node];
      const what = step === found.steps ? "finished sample" : step === 0 ? "start" : `after step ${step} of ${found.steps}`;
      return `${what}, score ${number(score)}, at ${forwards} forwards` + (kept ? "" : ", pruned") + (node === found.best ? ", the best" : "") + (parent >= 0 ? `, from one of ${number(found.nodes[parent][SCORE])}` : "");
    };
    const boxes = new Map();
    const tell = (node) => {
      told.textContent = words(node);
      const own = new Set(line(found, node));
      for (const [other, edge] of edges) edge.classList.toggle("told", own.has(other));
    };
    for (const [x, [round, shown]] of all.entries()) {
      const [, step, , forwards] = found.nodes[round[0]];
      const head = element("div", { class: "round" }, `${step === found.steps ? "finished" : "step " + step}`, element("br"), `${forwards} forwards`);
      head.style.left = x * (wide + GAP) + "px";
      area.append(head);
      for (const node of shown) {
        const { x: left, y: top } = spots.get(node), [, , score, , kept] = found.nodes[node];
        const view = element("span", { class: "tile" + (gallery.small(width, height) ? " pixels" : "") });
        if (found.sheet && place.has(node)) {
          const at = place.get(node);
          view.style.backgroundImage = `url("pictures/${found.sheet}")`;
          view.style.backgroundSize = `${sheet * wide}px auto`;
          view.style.backgroundPosition = `${-(at % sheet) * wide}px ${-Math.floor(at / sheet) * high}px`;
        }
        view.style.height = high + "px";
        const button = element("button", { type: "button", class: "node" + (kept ? "" : " pruned") + (best.has(node) ? " best" : ""), tabindex: node === found.best ? "0" : "-1",
          "aria-label": words(node), onpointerenter: () => tell(node), onfocus: () => tell(node) }, view, element("span", {}, (node === found.best ? "★ " : kept ? "" : "✕ ") + number(score)));
        button.style.left = left + "px";
        button.style.top = top + "px";
        button.style.width = wide + "px";
        boxes.set(node, button);
        area.append(button);
      }
      const more = round.length - shown.length;
      if (more) {
        const rest = element("div", { class: "round" }, `and ${more} more`);
        rest.style.left = x * (wide + GAP) + "px";
        rest.style.top = CAPTION * 2 + shown.length * (box + 8) + "px";
        area.append(rest);
      }
      columns.push(shown);
    }
    area.addEventListener("keydown", (event) => {
      const node = [...boxes].find(([, button]) => button === document.activeElement)?.[0];
      if (node === undefined) return;
      const { column, row } = spots.get(node);
      const child = columns.slice(column + 1).flat().find((other) => found.nodes[other][PARENT] === node);
      const to = {
        ArrowUp: columns[column][row - 1], ArrowDown: columns[column][row + 1],
        ArrowLeft: boxes.has(found.nodes[node][PARENT]) ? found.nodes[node][PARENT] : columns[column - 1]?.[0],
        ArrowRight: child ?? columns[column + 1]?.[0], Home: columns[0][0], End: found.best,
      };
      if (!(event.key in to)) return;
      event.preventDefault();
      const next = boxes.get(to[event.key]);
      if (!next) return;
      boxes.get(node).tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    tell(found.best);
    return [element("p", { class: "hint" }, "The samples of a column were scored together, best on top. An unfinished sample is shown as the picture it would end in. ✕ and a dashed edge: dropped. ★ and the bold line: the best, and where it came from."),
      told, element("div", { class: "tree", tabindex: "0", role: "region", "aria-label": "What was tried; arrow keys move from the best" }, area)];
  }

  // what each method found for a prompt, and from what
  function ends(all, chosen, choose) {
    return element("ul", { class: "members" }, all.map((found) => {
      const first = found.nodes.find(([, step]) => step === found.steps), best = found.nodes[found.best];
      const picture = found.pictures.best ? gallery.image("pictures/" + found.pictures.best, `best of ${found.method}, score ${number(best[SCORE])}`) : element("div", { class: "missing" }, "no picture");
      return element("li", {}, picture, element("button", { type: "button", "aria-pressed": found === chosen ? "true" : "false", onclick: () => choose(found) }, text(found.method)),
        element("dl", {}, [["best", number(best[SCORE])], ["first", number(first?.[SCORE])], ["forwards", number(found.forwards)], ["scored", number(found.calls)]]
          .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    }));
  }

  gallery.views.search = (main, settings) => {
    let at = prompts[settings.prompt] ? Number(settings.prompt) : 0, method = settings.method ?? methods[0];
    const controls = element("div", { class: "controls" }), body = element("div");
    main.append(controls, body);
    const refresh = () => {
      const found = prompts[at].find((own) => own.method === method) ?? prompts[at][0];
      gallery.remember("search", { prompt: at, method: found.method });
      controls.replaceChildren(gallery.select("Prompt", prompts.map(([own], i) => [i, named(own)]), at, (value) => { at = Number(value); refresh(); }));
      body.replaceChildren(element("h2", {}, text(found.prompt)), ends(prompts[at], found, (other) => { method = other.method; refresh(); }),
        element("h2", {}, "What ", text(found.method), " tried"), ...tree(found));
    };
    const next = (by) => { if (prompts[at + by]) { at += by; refresh(); } };
    refresh();
    return gallery.keys({ n: () => next(1), p: () => next(-1) });
  };

  // [forwards, best score so far] of a search, wherever a finished sample was better than all before it
  function progress(found) {
    const points = [];
    let before = 0;
    for (const round of rounds(found)) {
      const used = found.nodes[round[0]][FORWARDS];
      round.forEach((node, i) => {
        const [parent, step, score] = found.nodes[node];
        // plain samples share a batch, but each takes its own part of the forwards
        const at = parent < 0 ? before + Math.round(((used - before) * (i + 1)) / round.length) : used;
        if (step === found.steps && (!points.length || score > points.at(-1)[1])) points.push([at, score]);
      });
      before = used;
    }
    return points;
  }
  const reached = (points, forwards) => points.findLast(([at]) => at <= forwards)?.[1];

  // the mean over searches of the best so far, from where all have a sample, as stairs
  function mean(all) {
    const curves = all.map(progress).filter((points) => points.length);
    if (!curves.length) return [];
    const first = Math.max(...curves.map(([[at]]) => at)), last = Math.max(...all.map((found) => found.forwards ?? 0), first);
    const stops = [...new Set([first, ...curves.flat().map(([at]) => at), last])].filter((at) => at >= first).sort((a, b) => a - b);
    const stairs = [];
    for (const at of stops) {
      const value = curves.reduce((sum, points) => sum + reached(points, at), 0) / curves.length;
      if (stairs.length && value !== stairs.at(-1)[1]) stairs.push([at, stairs.at(-1)[1]]);
      stairs.push([at, value]);
    }
    return stairs;
  }

  gallery.views.compute = (main) => {
    const among = (all, method) => all.filter((found) => found.method === method);
    const chart = (name, all, prompt) => gallery.chart({
      name, over: "forwards", lines: methods.map((method, index) => ({ index, name: method, points: mean(among(all, method)) })),
      open: ({ line }) => { gallery.go("search", { prompt, method: line.name }); },
    });
    const whole = data.runs.map((run, i) => data.searches.filter((found) => found.run === i)).filter((all) => all.length);
    const means = whole.map((all) => {
      const count = new Set(all.map((found) => found.number)).size;
      return chart((data.runs.length > 1 ? data.runs[all[0].run].name + ": " : "") + (count > 1 ? `mean of ${count} prompts` : gallery.shortened(all[0].prompt)), all, prompts.findIndex(([own]) => own.run === all[0].run));
    });
    const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    // of several folders: what each method reaches with each budget
    const budgets = whole.length < 2 ? [] : [gallery.chart({
      name: "best score, by budget", over: "forwards", lines: methods.map((method, index) => ({ index, name: method,
        points: whole.map((all) => among(all, method)).filter((own) => own.length)
          .map((own) => [average(own.map((found) => found.forwards ?? 0)), average(own.map((found) => found.nodes[found.best][SCORE]))]).sort(([a], [b]) => a - b) })),
    })];
    const each = prompts.length > whole.length ? prompts.slice(0, CHARTS).map((all, i) => chart(named(all[0]), all, i)) : [];
    main.append(gallery.legend(methods),
      element("p", { class: "hint" }, "The score of the best sample so far over the network evaluations used. Click, or focus a chart, move with the arrow keys and press Enter, to see what was tried."),
      element("div", { class: "charts" }, budgets, means, each));
  };
})();
