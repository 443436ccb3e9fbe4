"use strict";
// The texts of a group token by token, shaded by how probable a token was, how uncertain the model was, or what it earned.

gallery.views.tokens = (main, settings) => {
  const { element, text, number, signed } = gallery;
  const kinds = {
    surprise: ["how improbable", "The darker, the less probable the token was when it was drawn."],
    entropy: ["entropy", "The darker, the more uncertain the model was; the darkest of this prompt's tokens has the most entropy."],
    advantage: ["advantage", "Green was reinforced, red was discouraged; the darkest of this prompt's tokens has the largest advantage."],
  };
  let kind = kinds[settings.by] ? settings.by : "surprise";

  // share of the full shade, and which colour
  function shade([, chance, entropy, advantage], largest) {
    if (kind === "surprise") return chance === null ? null : ["accent", 1 - Math.exp(chance)];
    if (kind === "entropy") return entropy === null ? null : ["accent", entropy / (largest.entropy || 1)];
    return advantage === null ? null : [advantage > 0 ? "up" : "down", Math.abs(advantage) / (largest.advantage || 1)];
  }

  function draw(entry) {
    const tokens = entry.members.flatMap((member) => member.tokens);
    const most = (column) => tokens.reduce((best, token) => Math.max(best, Math.abs(token[column] ?? 0)), 0);
    const largest = { entropy: most(2), advantage: most(3) };
    const hint = element("p", { class: "hint" });
    const pieces = [];
    const paint = () => {
      hint.textContent = kinds[kind][1];
      for (const [token, piece] of pieces) {
        const made = shade(token, largest);
        piece.style.background = made ? `color-mix(in srgb, var(--${made[0]}) ${Math.round(28 * made[1])}%, transparent)` : "";
      }
    };
    const members = [...entry.members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)).map((member) => {
      const line = member.tokens.map((token, i) => {
        const [words, chance, entropy, advantage] = token;
        const last = i === member.tokens.length - 1 && words === "";
        const piece = element("span", { class: "token", title: `${last ? "end of the text" : words}: log-probability ${number(chance)}, entropy ${number(entropy)}, advantage ${signed(advantage)}` },
          last ? "▪" : words);
        pieces.push([token, piece]);
        return piece;
      });
      const table = element("details", {}, element("summary", {}, "Numbers"), element("div", { class: "wide" }, element("table", {},
        element("thead", {}, element("tr", {}, ["token", "log-probability", "entropy", "advantage"].map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, member.tokens.map(([words, ...values]) => element("tr", {}, element("th", { scope: "row" }, text(words === "" ? "(end)" : words)),
          values.map((value) => element("td", {}, number(value)))))))));
      return element("li", {}, element("p", {}, element("strong", {}, "reward ", number(member.reward)), ` advantage ${signed(member.advantage)} `, element("span", { class: "seed" }, `seed ${member.seed}`)),
        line.length ? element("p", { class: "written" }, element("bdi", { dir: "auto" }, line)) : gallery.written(member.text ?? ""), table);
    });
    paint();
    const by = gallery.select("Shade by", Object.entries(kinds).map(([key, [name]]) => [key, name]), kind, (value) => { kind = value; paint(); });
    return [element("h2", {}, text(entry.prompt)), element("div", { class: "controls" }, by), hint, element("ul", { class: "lines" }, members)];
  }
  return gallery.chooser(main, "tokens", "groups", settings, gallery.given, draw);
};
