"use strict";
// Blind votes: two pictures or texts of one prompt, in random order and on random sides. The server knows which is which.
// Two moments are judged seed by seed; one moment, chosen for both sides, by every two seeds of a prompt.

gallery.views.vote = (main, settings) => {
  const { element, text, columns } = gallery;
  if (!location.protocol.startsWith("http")) {
    main.append(element("p", {}, "Voting needs a place to keep the votes. Run this where the runs are, and open the address it prints:"),
      gallery.command(`flowalign gallery ${gallery.data.runs.map((run) => run.name).join(" ")} --serve`));
    return;
  }
  if (!columns.length) {
    main.append(element("p", { class: "empty" }, "Voting needs pictures or texts."));
    return;
  }
  const names = columns.map((c) => [c.index, c.label]);
  const chosen = {
    rater: localStorage.getItem("rater") ?? "", a: columns[settings.a] ? settings.a : "0", b: columns[settings.b] ? settings.b : String(columns.length - 1),
  };
  const rater = element("input", { value: chosen.rater, maxlength: 80, autocomplete: "nickname", required: true, oninput: () => { chosen.rater = rater.value.trim(); } });
  const ballot = element("section", { class: "ballot", "aria-label": "Ballot" });
  const results = element("section", { class: "results", "aria-label": "Results" });
  const status = element("p", { class: "count", role: "status" });
  main.append(
    element("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); start(); } },
      element("label", {}, "Your name", rater),
      ...(columns.length > 1 ? [gallery.select("One", names, chosen.a, (value) => { chosen.a = value; }), gallery.select("Other", names, chosen.b, (value) => { chosen.b = value; })] : []),
      element("button", { class: "main" }, "Start"), element("button", { type: "button", onclick: show }, "Results")),
    status, ballot, results);
  ballot.append(element("p", { class: "hint" }, "You will see two samples of one prompt and choose the better one. Give your name, then Start."));

  async function ask(path, body) {
    const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
    const query = body ? "" : "?" + new URLSearchParams({ rater: chosen.rater, a: chosen.a, b: chosen.b });
    try {
      const reply = await fetch("api/" + path + query, options);
      const answer = await reply.json();
      if (!reply.ok) throw new Error(answer.error);
      return answer;
    } catch (error) {
      status.textContent = error instanceof TypeError || error instanceof SyntaxError ? "The server does not answer; votes already given are safe." : error.message;
      return null;
    }
  }

  // of a run that goes on: what it has made since the page was laid out
  const news = element("p", { class: "hint", role: "status" });
  status.after(news);
  const watch = setInterval(async () => {
    const reply = await fetch("api/moments").catch(() => null);
    const { moments } = reply?.ok ? await reply.json() : { moments: 0 };
    if (moments <= columns.length || news.firstChild) return;
    const newest = moments - 1, a = chosen.a === chosen.b ? newest : chosen.a;
    news.append("The run has made new samples. ", element("button", { type: "button",
      onclick: () => { gallery.remember("vote", { a, b: newest }); location.reload(); } }, "Vote on them"));
  }, 5000);

  let pair = null, busy = false;
  async function start() {
    if (!chosen.rater) { status.textContent = "Please give your name first."; rater.focus(); return; }
    localStorage.setItem("rater", chosen.rater);
    gallery.remember("vote", { a: chosen.a, b: chosen.b });
    results.replaceChildren();
    rater.blur();
    present(await ask("next"));
  }

  function present(next) {
    if (!next) return;
    pair = next.pair === null ? null : next;
    status.textContent = `${next.done} of ${next.total} judged`;
    const progress = element("progress", { max: next.total, value: next.done, "aria-label": "Judged pairs" });
    const undo = element("button", { type: "button", disabled: next.done === 0, onclick: () => act("undo") }, "Undo ", element("kbd", {}, "u"));
    if (!pair) {
      ballot.replaceChildren(progress, element("p", {}, next.total ? "All pairs are judged. Thank you!" : chosen.a === chosen.b ? "This moment has no two samples of one prompt." : "These two moments have nothing of one prompt and seed that differs."), element("div", { class: "bar" }, undo));
      if (next.total) show();
      return;
    }
    const choice = (side, name, key) => {
      const view = "text" in pair[side] ? gallery.written(pair[side].text) : gallery.image(pair[side].picture, `${name} picture`);
      return element("button", { type: "button", onclick: () => act(side) }, view, `${name} is better `, element("kbd", {}, key));
    };
    ballot.replaceChildren(progress, element("h2", {}, text(pair.prompt)),
      element("div", { class: "pair" }, choice("left", "Left", "←"), choice("right", "Right", "→")),
      element("div", { class: "bar" },
        element("button", { type: "button", onclick: () => act("tie") }, "Tie ", element("kbd", {}, "t")),
        element("button", { type: "button", onclick: () => act("skip") }, "Skip ", element("kbd", {}, "s")), undo));
  }

  async function act(verdict) {
    if (busy || (!pair && verdict !== "undo")) return;
    busy = true;
    const common = { rater: chosen.rater, a: Number(chosen.a), b: Number(chosen.b) };
    const next = await ask(verdict === "undo" ? "undo" : "vote", verdict === "undo" ? common : { ...common, pair: pair.pair, verdict });
    busy = false;
    present(next);
  }

  async function show() {
    const table = await ask("results");
    if (!table) return;
    const percent = (x) => (x === null ? "–" : (100 * x).toFixed(1) + "%");
    const rate = (r) => (r.rate === null ? "–" : `${percent(r.rate)} (${percent(r.low)} to ${percent(r.high)})`);
    const again = (r) => (r.again?.pairs ? `${rate(r.again)} of ${r.again.pairs}` : "–");
    const caught = (r) => (r.caught?.pairs ? `${rate(r.caught)} of ${r.caught.pairs}` : "–");
    const kappa = (r) => (r.kappa === null ? "–" : `${r.kappa.toFixed(2)} (${r.low.toFixed(2)} to ${r.high.toFixed(2)})`);
    const grid = (head, lines) => element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `Votes by ${head[0]}` }, element("table", {}, element("thead", {}, element("tr", {}, head.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, lines.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row" }, name), cells.map((c) => element("td", {}, c)))))));
    const [a, b] = [columns[chosen.a].label, columns[chosen.b].label];
    const rows = [["all", table.all], ...table.raters.map((r) => [text(r.rater), r])];
    const won = chosen.a === chosen.b ? [
      element("h2", {}, "Two seeds of ", text(a)),
      element("p", { class: "hint" }, "Both pictures of a pair are from one model, so there is no win rate: the choices are for training."),
      grid(["rater", "choices", "ties", "skipped", "same when shown again", "right where one is broken"], rows.map(([name, r]) => [name, r.wins + r.losses, r.ties, r.skipped, again(r), caught(r)])),
    ] : [
      element("h2", {}, text(b), " against ", text(a)),
      element("p", { class: "hint" }, "Win rate of the second, a tie counting half, with the 95% Wilson interval. Skipped pairs are left out; under all, a pair that several judged counts once."),
      grid(["rater", "win rate", "wins", "losses", "ties", "skipped", "same when shown again", "right where one is broken"], rows.map(([name, r]) => [name, rate(r), r.wins, r.losses, r.ties, r.skipped, again(r), caught(r)])),
      element("p", { class: "hint" }, table.decided),
    ];
    results.replaceChildren(
      ...won,
      ...table.failing.map((line) => element("p", { class: "warning" }, text(line))),
      element("h2", {}, "Agreement between raters"),
      table.between.length ? grid(["raters", "pairs both judged", "same verdict", "Cohen's kappa"], table.between.map((r) => [element("span", {}, text(r.raters[0]), " and ", text(r.raters[1])), r.pairs, percent(r.same), kappa(r)]))
        : element("p", {}, "Nobody has judged a pair that another has judged."),
      ...(table.alpha.mean === null ? [] : [element("p", { class: "hint" }, `All raters: Krippendorff's alpha ${table.alpha.mean.toFixed(2)}` + (table.alpha.low === null ? "" : ` (${table.alpha.low.toFixed(2)} to ${table.alpha.high.toFixed(2)})`) + ` on ${table.alpha.pairs} pairs. 1 is full agreement, 0 that of chance.`)]),
      ...(table.more_between ? [element("p", { class: "hint" }, `and ${table.more_between} pairs of raters with fewer in common`)] : []),
      element("h2", {}, "Agreement with each reward"),
      table.rewards.length ? grid(["reward", "agrees with the choice", "choices"], table.rewards.map((r) => [text(r.name), rate(r), r.pairs])) : element("p", {}, "No choice yet between samples that a reward tells apart."),
      element("h2", {}, "Train on the votes"),
      element("p", { class: "hint" }, table.enough),
      ...table.commands.map(gallery.command),
      element("p", {}, element("a", { href: "api/export", download: "preferences.jsonl" }, "Download all votes as preference JSON lines")));
  }

  const off = gallery.keys({ ArrowLeft: () => act("left"), ArrowRight: () => act("right"), t: () => act("tie"), s: () => act("skip"), u: () => act("undo") });
  return () => { off(); clearInterval(watch); };
};
