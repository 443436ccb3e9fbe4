"use strict";
// How single samples came to be (film strips), and how the members of a group were judged.

(() => {
  const { data, element, text, number, signed } = gallery;

  gallery.given = (group) => group.members.map(({ reward }) => reward);

  // choosers for the moment and the entry of it, shared by both views
  function chooser(main, view, kind, settings, rewards, draw) {
    const moments = data.previews.filter((moment) => moment[kind].length);
    if (!moments.length) {
      main.append(element("p", { class: "empty" }, "This run has saved no previews; the trainer saves them where previews are switched on."));
      return;
    }
    const name = (moment) => (gallery.several ? data.runs[moment.run].name + " · " : "") + "iteration " + moment.iteration;
    let at = moments[settings.at] ? Number(settings.at) : moments.length - 1;
    // first the one whose rewards differ most: there is something to see
    const spread = (entry) => { const all = rewards(entry).filter((value) => value !== null); return all.length ? Math.max(...all) - Math.min(...all) : 0; };
    const telling = moments[at][kind].reduce((best, entry, i, all) => (spread(entry) > spread(all[best]) ? i : best), 0);
    let entry = moments[at][kind][settings.entry] ? Number(settings.entry) : telling;
    const controls = element("div", { class: "controls" }), body = element("div");
    main.append(controls, body);
    const refresh = () => {
      entry = Math.min(entry, moments[at][kind].length - 1);
      gallery.remember(view, { at, entry });
      controls.replaceChildren(
        gallery.select("Moment", moments.map((m, i) => [i, name(m)]), at, (value) => { at = Number(value); refresh(); }),
        gallery.select("Prompt", moments[at][kind].map((e, i) => [i, gallery.shortened(e.prompt) + (e.seed ? ` (seed ${e.seed})` : "")]), entry,
          (value) => { entry = Number(value); refresh(); }),
        element("button", { type: "button", disabled: at === 0, onclick: () => later(-1) }, "Earlier ", element("kbd", {}, "[")),
        element("button", { type: "button", disabled: at === moments.length - 1, onclick: () => later(1) }, "Later ", element("kbd", {}, "]")));
      body.replaceChildren(...draw(moments[at][kind][entry], moments[at]));
    };
    const later = (by) => { if (moments[at + by]) { at += by; refresh(); } };
    const next = (by) => { if (moments[at][kind][entry + by]) { entry += by; refresh(); } };
    refresh();
    return gallery.keys({ "[": () => later(-1), "]": () => later(1), n: () => next(1), p: () => next(-1) });
  }

  const picture = (name, alt) =>
    name ? gallery.image("pictures/" + name, alt, { loading: "lazy" }) : element("div", { class: "missing" }, "no picture");
  const pairs = (entries) => element("dl", {}, entries.filter(([, value]) => value !== undefined && value !== null)
    .flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]));
  const toned = (value) => (value === null || value === undefined ? null
    : element("span", { class: value > 0 ? "up" : value < 0 ? "down" : "" }, signed(value)));

  // how much of what each state was worth lasted, in the iteration of training that is nearest to the film
  function lasting({ run, iteration }, states) {
    const { series } = data.runs[run];
    return Array.from({ length: states }, (_, state) => (series[`dense/persistence/${state}`] ?? [])
      .reduce((best, point) => (best === null || Math.abs(point[0] - iteration) < Math.abs(best[0] - iteration) ? point : best), null)?.[1] ?? null);
  }

  // what the credit of the steps was: where it lies, how often it turns, and what the run did not record
  function credit(entry, worth) {
    const gains = (entry.dense ?? []).filter((gain, step) => gain && (entry.stochastic?.[step] ?? true));
    const flips = gains.filter((gain, i) => i > 0 && gain * gains[i - 1] < 0).length;
    const lines = [], say = (value, words) => { if (value) lines.push(words); };
    say(gains.length > 1, `The gain changes its sign ${flips} of ${gains.length - 1} times.`);
    const brief = worth.flatMap((value, state) => (value !== null && value < 0.5 ? [state] : []));
    say(brief.length, `After ${brief.length > 1 ? "steps" : "step"} ${brief.join(", ")} less than half of a lead lasted (persistence below 0.5): the gain of the step after it is noisier than the final reward.`);
    const missing = [];
    const lacks = (value, words) => { if (value) missing.push(words); };
    lacks(!entry.advantages, "advantages (methods of the trajectory family)");
    lacks(entry.advantages && entry.sparse === null, "dense advantages (algorithm: dense_grpo)");
    lacks(worth.every((value) => value === null), "persistence (algorithm: dense_grpo, with estimator.kind: ode or estimator.check_every)");
    lacks(!entry.ratios, "ratios (model.lora)");
    say(missing.length, `Not recorded: ${missing.join("; ")}.`);
    return element("p", { class: "hint" }, lines.join(" "));
  }

  // a chart of values of steps; none where nothing was recorded
  function bySteps(name, lines) {
    const drawn = lines.map(([name, values], index) => ({ index, name, points: (values ?? []).flatMap((value, i) => (value === null ? [] : [[i + 1, value]])) }));
    if (!drawn.some((line) => line.points.length)) return null;
    const named = drawn.filter((line) => line.points.length && line.name);
    return element("div", {}, gallery.chart({ name, lines: drawn, over: "step" }), named.length > 1 ? gallery.legend(named.map((line) => line.name)) : null);
  }

  function film(entry, moment) {
    const worth = lasting(moment, entry.pictures.length);
    const dense = entry.sparse !== null;
    const sparse = dense ? (entry.advantages ?? []).map((value) => (value === null ? null : entry.sparse)) : null;
    const steps = entry.pictures.map((name, state) => {
      // a state is shown with the step that led to it; the start noise has none
      const step = state - 1, of = (list) => (step < 0 ? undefined : entry[list]?.[step]);
      const stochastic = Boolean(of("stochastic")), turning = Boolean(of("turning"));
      const title = step < 0 ? "start noise" : `step ${step + 1}`;
      const badges = [stochastic ? element("span", { class: "badge" }, "∿ stochastic") : null, turning ? element("span", { class: "badge turn" }, "↻ turning point") : null];
      return element("li", { class: (stochastic ? "stochastic " : "") + (turning ? "turning" : "") },
        picture(name, `${title}: what it would end in, reward ${number(entry.rewards?.[state])}`), element("strong", {}, title), " ", badges,
        pairs([["σ", entry.sigmas ? number(entry.sigmas[state]) : null], ["noise", stochastic && entry.noise ? number(of("noise")) : null],
          ["reward", entry.rewards ? number(entry.rewards[state]) : null], ["gain", toned(of("dense"))], [dense ? "dense" : "advantage", toned(of("advantages"))],
          ["sparse", dense ? toned(sparse[step]) : null], ["ratio", of("ratios") ? number(of("ratios")) : null], ["persists", worth[state] === null ? null : number(worth[state])]]));
    });
    const more = element("p", { class: "more hint" });
    const tell = () => {
      const hidden = steps.filter((step) => step.offsetLeft + step.offsetWidth / 2 > strip.offsetLeft + strip.scrollLeft + strip.clientWidth).length;
      more.textContent = hidden ? `${hidden} more to the right →` : "";
    };
    const strip = element("ol", { tabindex: "0", "aria-label": "Film strip, arrow keys scroll", onscroll: tell }, steps);
    new ResizeObserver(tell).observe(strip);
    return [element("h2", {}, text(entry.prompt)),
      element("p", { class: "hint" }, "Each picture is what the sample would end in after that step. Gain: what the step added to the reward. A dashed edge marks a stochastic step."),
      credit(entry, worth), more, strip,
      element("div", { class: "charts" }, bySteps("gain of a step", [["", entry.dense]]),
        bySteps("advantage of a step", dense ? [["dense: of the step's gain", entry.advantages], ["sparse: of the finished sample", sparse]] : [["", entry.advantages]]),
        bySteps("ratio to the start weights", [["", entry.ratios]]), bySteps("noise of a step", [["", entry.noise]]),
        bySteps("persistence", [["", worth.slice(1)]])),
      element("details", { class: "hint about" }, element("summary", {}, "What these are"), element("dl", {}, [
        ["gain", "the reward of what the sample would end in after the step, less that before it"],
        ["advantage", "what the run learns from: dense of each step's own gain, sparse of the finished sample's reward, the same at every step; both against the other samples of the prompt"],
        ["ratio", "how much more probable these weights make the step than the start weights, by the mean over the elements"],
        ["noise", "standard deviation of what the step drew"],
        ["persistence", "correlation of what a state is worth with the final reward, within groups, in the training iteration nearest to the film"],
      ].flatMap(([name, words]) => [element("dt", {}, name), element("dd", {}, words)])))];
  }

  function group(entry) {
    const rank = new Map([...entry.members.keys()].sort((a, b) => (entry.members[b].reward ?? -Infinity) - (entry.members[a].reward ?? -Infinity)).map((member, i) => [member, i]));
    const order = [...rank.keys()];
    // equal rewards share a rank
    const place = (i) => 1 + entry.members.filter((m) => (m.reward ?? -Infinity) > (entry.members[i].reward ?? -Infinity)).length;
    const members = order.map((i) => {
      const m = entry.members[i];
      const shown = m.text === null ? picture(m.picture, `rank ${place(i)}, reward ${number(m.reward)}, seed ${m.seed}`) : gallery.written(m.text);
      return element("li", {}, shown, element("strong", {}, `#${place(i)}`), element("span", { class: "seed" }, ` seed ${m.seed}`),
        m.rewritten === null ? null : element("p", { class: "rewritten" }, "became: ", text(m.rewritten)),
        pairs([["reward", number(m.reward)], ["advantage", toned(m.advantage)], ...Object.entries(m.parts).map(([name, value]) => [text(name), number(value)])]));
    });
    const parts = [element("h2", {}, text(entry.prompt)), element("p", { class: "hint" }, `${entry.members.length} samples of one prompt, best first`), element("ul", { class: entry.members.some((m) => m.text !== null) ? "members texts" : "members" }, members)];
    if (entry.wins) {
      const small = (i) => (entry.members[i].text === null ? picture(entry.members[i].picture, `seed ${entry.members[i].seed}`) : null);
      parts.push(element("h2", {}, "Pairwise verdicts"), element("p", { class: "hint" }, "1: the row's sample beat the column's, 0: it lost, 0.5: a tie. Last column: the row's share of wins."),
        element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Pairwise verdicts" }, element("table", { class: "matrix" },
          element("thead", {}, element("tr", {}, element("td"), order.map((i) => element("th", { scope: "col" }, small(i), `#${place(i)}`)), element("th", { scope: "col" }, "wins"))),
          element("tbody", {}, order.map((i) => {
            const others = order.filter((j) => j !== i && entry.wins[i][j] !== null);
            const share = others.length ? others.reduce((sum, j) => sum + entry.wins[i][j], 0) / others.length : null;
            return element("tr", {}, element("th", { scope: "row" }, small(i), `#${place(i)}`),
              order.map((j) => element("td", { class: i === j ? "" : entry.wins[i][j] > 0.5 ? "win" : entry.wins[i][j] < 0.5 ? "loss" : "" }, i === j ? "" : number(entry.wins[i][j]))),
              element("td", {}, number(share)));
          })))));
    }
    return parts;
  }

  gallery.chooser = chooser;
  gallery.views.film = (main, settings) => chooser(main, "film", "films", settings, (entry) => entry.rewards ?? [], film);
  gallery.views.groups = (main, settings) => chooser(main, "groups", "groups", settings, gallery.given, group);
})();
