// Learning curves.

const DENSE = 60;  // a series of fewer points is drawn with dots and never smoothed: an average would lag behind it
const HEIGHT = NARROW ? 170 : 220, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 24;
const FEW = 20, TYPICAL = 0.96, MUCH = 4;
// A line of at least FEW points whose range is more than MUCH times that of its TYPICAL share: one spike would flatten it.

function drawCurves() {
  const section = document.getElementById("curves");
  if (!data.charts.length) {
    section.append(el("h2", {}, "Learning curves"), el("p", { class: "muted" }, "No metrics were recorded yet."));
    return;
  }
  const longest = Math.max(...data.charts.flatMap((chart) => chart.series.map((one) => one.steps.length)));
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: longest > 2 * DENSE ? 0.7 : 0 });
  const whole = el("input", { type: "checkbox" });
  const moving = data.charts.filter((chart) => chart.series.some((one) => one.values.some((value) => value !== 0)));
  const still = data.charts.filter((chart) => !moving.includes(chart)).map((chart) => chart.title);
  const cards = moving.map(chartCard);
  const redraw = () => cards.forEach((card) => card.draw(Number(slider.value), whole.checked));
  for (const input of [slider, whole]) input.addEventListener("input", redraw);
  const grid = el("div", { class: "grid" }, ...cards.map((card) => card.node));
  section.append(
    el("div", { class: "row heading" },
      el("h2", {}, "Learning curves"), el("label", {}, "Smoothing", slider), el("label", {}, whole, "Show spikes whole")),
    grid,
    el("p", { class: "small muted" }, still.length ? `Always 0: ${still.join(", ")}.` : ""));
  let width = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth !== width) { width = grid.clientWidth; redraw(); }
  }).observe(grid);
}

function chartCard(chart) {
  const legend = el("div", { class: "legend" }, ...chart.series.map((one, index) =>
    el("span", {}, el("i", { style: `background:${color(one, index)}` }), one.label + " ",
      el("b", {}, number(one.values.findLast((value) => value !== null))))));
  const canvas = svg("svg", { height: HEIGHT, role: "img", "aria-label": chart.title });
  const beyond = el("div", { class: "small muted" });
  const node = el("div", { class: "card" }, el("h3", {}, chart.title), legend, canvas, beyond,
    chart.nonfinite ? el("div", { class: "small bad-text" }, `NaN or infinite, not drawn: ${number(chart.nonfinite)}`) : null);
  return { node, draw: (smoothing, whole) => { beyond.textContent = drawChart(canvas, chart, smoothing, whole); } };
}

function drawChart(canvas, chart, smoothing, whole) {
  const width = Math.max(240, canvas.clientWidth || 400);
  canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  canvas.replaceChildren();
  const layers = chart.kind === "stack" ? stackLayers(chart.series) : chart.series.map((one) => ({ ...one, base: null }));
  const axes = makeAxes(chart, layers, width, whole);
  drawAxes(canvas, axes, width);
  layers.forEach((layer, index) => {
    if (layer.base) drawBand(canvas, layer, axes, index);
    if (layer.low) drawSpread(canvas, layer, axes, index);
    if (!layer.base) drawLine(canvas, layer, axes, index, smoothing);
  });
  addHover(canvas, chart, axes, width);
  return axes.cut;
}

function stackLayers(series) {
  let base = series[0].values.map(() => 0);
  return series.map((one) => {
    const top = one.values.map((value, index) => base[index] + (value || 0));
    const layer = { ...one, values: top, base };
    base = top;
    return layer;
  });
}

function makeAxes(chart, layers, width, whole) {
  const steps = layers.flatMap((layer) => layer.steps);
  let values = layers.flatMap((layer) => layer.values.concat(layer.base || [], layer.low || [], layer.high || [])).filter((value) => value !== null);
  const positive = values.filter((value) => value > 0);
  const log = chart.scale === "log" && positive.length > 0;
  if (log) values = positive;
  let [low, high] = whole || log ? ends(values) : fitting(values);
  const outside = values.filter((value) => value < low || value > high);
  const cut = outside.length ? `Beyond the scale: ${number(outside.length)} of ${number(values.length)} points, up to ` +
    number(outside.reduce((worst, value) => Math.abs(value) > Math.abs(worst) ? value : worst)) : "";
  if (log) { [low, high] = [Math.log10(low), Math.log10(high)]; }
  if (high - low < 1e-12 * Math.max(1e-3, Math.abs(high))) {
    const pad = log ? 0.5 : Math.abs(high) * 0.1 || 1;
    [low, high] = [low - pad, high + pad];
  }
  if (chart.kind === "stack") low = 0;
  else { const pad = (high - low) * 0.04; low -= pad; high += pad; }
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const x = (step) => LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT);
  const y = (value) => {
    const at = Math.min(high, Math.max(low, log ? (value > 0 ? Math.log10(value) : low) : value));
    return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  };
  return { x, y, log, low, high, first, last, cut };
}

function ends(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function fitting(values) {
  const [low, high] = ends(values), ordered = values.toSorted((a, b) => a - b);
  const edge = Math.floor(values.length * (1 - TYPICAL) / 2);
  const usual = [ordered[edge], ordered[values.length - 1 - edge]], span = usual[1] - usual[0];
  if (values.length < FEW || !(span > 0) || high - low <= MUCH * span) return [low, high];
  return [Math.max(low, usual[0] - span / 4), Math.min(high, usual[1] + span / 4)];
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9; index++) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const factors = high - low < 2.2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += every) {
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  }
  return ticks.filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
}

function drawAxes(canvas, axes, width) {
  let ticks = axes.log ? logTicks(axes.low, axes.high) : linearTicks(axes.low, axes.high, 6);
  if (axes.log && ticks.length < 2) ticks = linearTicks(10 ** axes.low, 10 ** axes.high, 3).filter((tick) => tick > 0);
  for (const tick of ticks) {
    const at = axes.y(tick);
    canvas.append(
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, stroke: "var(--line)" }),
      svg("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, tickLabel(tick)));
  }
  for (const tick of linearTicks(axes.first, axes.last, Math.max(2, width / 65)).filter(Number.isInteger)) {
    const anchor = axes.x(tick) > width - 24 ? "end" : "middle";
    const at = anchor === "end" ? width - 2 : axes.x(tick);
    canvas.append(svg("text", { x: at, y: HEIGHT - 6, "text-anchor": anchor }, tickLabel(tick)));
  }
}

function linePath(steps, values, axes) {
  let path = "", broken = true;
  values.forEach((value, index) => {
    if (value === null) { broken = true; return; }
    path += `${broken ? "M" : "L"}${axes.x(steps[index]).toFixed(1)} ${axes.y(value).toFixed(1)}`;
    broken = false;
  });
  return path;
}

function smooth(values, weight) {
  let average = null;
  return values.map((value) => {
    if (value === null) return null;
    average = average === null ? value : weight * average + (1 - weight) * value;
    return average;
  });
}

function drawLine(canvas, layer, axes, index, smoothing) {
  const style = { fill: "none", stroke: color(layer, index), "stroke-width": 1.8, "stroke-linejoin": "round" };
  const smoothed = smoothing > 0 && layer.values.length > DENSE;
  // One value beyond the scale would carry the average off for many steps.
  const inside = layer.values.map((value) => value === null || axes.log ? value : Math.min(axes.high, Math.max(axes.low, value)));
  canvas.append(svg("path", { ...style, d: linePath(layer.steps, layer.values, axes), opacity: smoothed ? 0.25 : 1 }));
  if (smoothed) canvas.append(svg("path", { ...style, d: linePath(layer.steps, smooth(inside, smoothing), axes) }));
  if (layer.values.length > DENSE) return;
  layer.values.forEach((value, at) => {
    if (value !== null) canvas.append(svg("circle", { cx: axes.x(layer.steps[at]), cy: axes.y(value), r: 2.4, fill: color(layer, index) }));
  });
}

function drawSpread(canvas, { steps, low, high, ...layer }, axes, index) {
  const there = low.map((_, at) => at).filter((at) => low[at] !== null);
  const pick = (values) => there.map((at) => values[at]);
  drawBand(canvas, { ...layer, steps: pick(steps), values: pick(high), base: pick(low) }, axes, index, 0.2);
}

function drawBand(canvas, layer, axes, index, opacity = 0.75) {
  const steps = [...layer.steps, ...layer.steps.toReversed()];
  const outline = linePath(steps, [...layer.values, ...layer.base.toReversed()], axes) + "Z";
  canvas.append(svg("path", { d: outline, fill: color(layer, index), opacity, stroke: color(layer, index), "stroke-width": 0.8 }));
}

function nearest(steps, at) {
  return steps.reduce((best, step, index) => Math.abs(step - at) < Math.abs(steps[best] - at) ? index : best, 0);
}

function addHover(canvas, chart, axes, width) {
  const steps = [...new Set(chart.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const rule = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--muted)", "stroke-dasharray": "3 3", visibility: "hidden" });
  canvas.append(rule);
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = axes.first + ((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT) * (axes.last - axes.first);
    const step = steps[nearest(steps, at)];
    rule.setAttribute("x1", axes.x(step));
    rule.setAttribute("x2", axes.x(step));
    rule.setAttribute("visibility", "visible");
    const rows = chart.series.map((one, index) => {
      const found = nearest(one.steps, step);
      // Downsampling keeps other steps in each series; beyond 1 % of the axis it is a gap, not a neighbour.
      return Math.abs(one.steps[found] - step) > (axes.last - axes.first) / 100 ? null : el("div", {}, el("i", { style: `background:${color(one, index)}` }),
        `${one.label}  `, el("b", {}, one.values[found] === null ? "not finite" : number(one.values[found])));
    });
    showTip(event, [el("div", { class: "muted" }, `step ${step}`), ...rows.filter((row) => row !== null)]);
  };
  canvas.onpointerleave = () => { rule.setAttribute("visibility", "hidden"); hideTip(); };
}

