"use strict";
// Lines over a number, such as a metric over the iterations: pointed at or moved along with the arrow keys.

(() => {
  const { element, svg, text, number } = gallery;
  const WIDTH = 420, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;

  // six colours, and beyond six lines dashes
  const look = (index) => `line-${index % 6} dash-${Math.floor(index / 6) % 4}`;
  const swatch = (index) => svg("svg", { class: "swatch", viewBox: "0 0 24 6", "aria-hidden": "true" }, svg("line", { class: `line ${look(index)}`, x1: 0, x2: 24, y1: 3, y2: 3 }));
  gallery.legend = (names) => element("ul", { class: "legend" }, names.map((name, i) => element("li", {}, swatch(i), text(name))));

  // with as few digits as tell them apart
  function ticks(values) {
    for (let digits = 3; ; digits++) {
      const words = values.map((v) => (v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits)))));
      if (new Set(words).size === values.length || digits === 15) return words;
    }
  }

  // the exponential mean of about a thirtieth of the points
  function smoothed(points) {
    const keep = 1 - 30 / points.length;
    let sum = 0, weight = 0;
    return points.map(([i, v]) => {
      sum = keep * sum + v; weight = keep * weight + 1;
      return [i, sum / weight];
    });
  }

  // lines: [{index, name, points: [[over, value, low, high], ...]}], the ends of an interval only where there is one; over: what the points are over; alarms: where the chart is marked;
  // open(point): what a click or Enter does with {over, value, line}, and says if it can do nothing
  gallery.chart = ({ name, label = name, same = [], lines, over = "iteration", alarms = [], open = () => "" }) => {
    lines = lines.filter((line) => line.points.length);
    const points = lines.flatMap((line) => line.points.map(([over, value, low = value, high = value]) => ({ over, value, low, high, line })));
    points.sort((a, b) => a.over - b.over || a.line.index - b.line.index);
    const range = (one, other = one) => points.reduce(([low, high], p) => [Math.min(low, one(p)), Math.max(high, other(p))], [Infinity, -Infinity]);
    const [start, end] = range((p) => p.over), [low, high] = range((p) => p.low, (p) => p.high);
    const x = (i) => LEFT + ((i - start) / (end - start || 1)) * (WIDTH - LEFT - RIGHT);
    // what hardly moves stays flat
    const least = 0.02 * Math.max(Math.abs(low), Math.abs(high)) || 1, spread = Math.max(high - low, least);
    const bottom = spread > high - low ? (low + high - spread) / 2 : low;
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
    for (const at of alarms) {
      if (at >= start && at <= end) {
        picture.append(svg("line", { class: "alarm", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }),
          svg("text", { class: "alarm", x: x(at), y: TOP + 10, "text-anchor": "middle" }, "⚠"));
      }
    }
    for (const line of lines) {
      const drawn = (points, more = "") => picture.append(svg("polyline", { class: `line ${look(line.index)}${more}`, points: points.map(([i, v]) => `${x(i)},${y(v)}`).join(" ") }));
      // many points: their running mean, and they themselves behind it
      drawn(line.points, line.points.length > 60 ? " raw" : "");
      if (line.points.length > 60) drawn(smoothed(line.points));
      if (line.points.length <= 60) {
        for (const [i, , low, high] of line.points) {
          if (low !== undefined) picture.append(svg("line", { class: `interval line-${line.index % 6}`, x1: x(i), x2: x(i), y1: y(low), y2: y(high) }));
        }
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
      mark.setAttribute("cx", x(point.over));
      mark.setAttribute("cy", y(point.value));
      mark.setAttribute("visibility", "visible");
      const ends = point.low < point.high ? ` (${number(point.low)} to ${number(point.high)})` : "";
      const words = `${number(point.value)}${ends} at ${over} ${point.over}${point.line.name ? `, ${point.line.name}` : ""}`;
      readout.replaceChildren(text(words));
      picture.setAttribute("aria-valuenow", point.over);
      picture.setAttribute("aria-valuetext", words);
    }
    function under(event) {
      const box = picture.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * WIDTH, py = ((event.clientY - box.top) / box.height) * HEIGHT;
      const far = (p) => (x(p.over) - px) ** 2 + 0.2 * (y(p.value) - py) ** 2;
      return points.reduce((best, p, i) => (far(p) < far(points[best]) ? i : best), 0);
    }
    function opened() {
      const words = open(points[at]);
      if (words) readout.textContent = words;
    }
    picture.addEventListener("pointermove", (event) => choose(under(event)));
    picture.addEventListener("click", (event) => { choose(under(event)); opened(); });
    picture.addEventListener("focus", () => choose(at));
    picture.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
      if (event.key in steps) { event.preventDefault(); choose(at + steps[event.key]); }
      else if (event.key === "Enter") opened();
    });
    return element("figure", { class: "chart" }, element("figcaption", {}, element("span", {}, text(label, { class: "metric", title: name }), same.length ? element("span", { class: "same" }, "the same: ", text(same.join(", "))) : null), readout), picture);
  };
})();
