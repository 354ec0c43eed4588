// Runs a page's script without a browser: `node page.js report.html` prints what the page would show.
// As much of a DOM as the page asks for: elements, attributes, text, listeners.
"use strict";
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const [, stored] = page.match(/id="report-data">([^]*?)<\/script>/);
const [, script] = page.match(/<script>\n([^]*?)<\/script>/);  // the one without an id

class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], style: {}, attributes: {}, listeners: {}, value: "", checked: false, className: "" }); }
  append(...nodes) { this.children.push(...nodes); if (this.tag === "select" && nodes[0] && this.value === "") this.value = nodes[0].value ?? ""; }
  replaceChildren(...nodes) { this.children = nodes; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  get textContent() { return this.children.map((child) => child instanceof Node ? child.textContent : String(child)).join(""); }
  set textContent(text) { this.children = [text]; }
  find(test) { return [...(test(this) ? [this] : []), ...this.children.flatMap((child) => child instanceof Node ? child.find(test) : [])]; }
}

const sections = {};
global.document = {
  title: "",
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  getElementById: (id) => sections[id] ??= new Node(id),
};
global.innerWidth = 1280;
global.ResizeObserver = class {
  constructor(resized) { this.resized = resized; }
  observe(node) { node.clientWidth = 800; this.resized(); }
};
document.getElementById("report-data").textContent = stored;
new Function(script)();

const rollouts = sections.rollouts;
const texts = (nodes) => nodes.map((node) => node.textContent);
const named = (name) => (node) => node.className.split(" ").includes(name);
const labelled = (name) => rollouts.find((node) => node.attributes["aria-label"] === name)[0];
const coloured = (sample) => texts(sample.find((node) => node.tag === "span" && node.style.background));
const shown = () => {
  const samples = rollouts.find(named("sample"));
  return {
    counts: texts(rollouts.find((node) => node.attributes["aria-pressed"])),
    groups: rollouts.find(named("group")).map((group) => group.children[0].textContent),
    prompts: texts(rollouts.find(named("prompt"))),
    samples: texts(samples),
    folded: samples.map((sample) => sample.find(named("folded")).length > 0),
    environment: texts(rollouts.find(named("environment"))),
    coloured: samples.map(coloured),
    backgrounds: samples.map((sample) => sample.find((node) => node.style.background).map((node) => node.style.background)),
    links: rollouts.find((node) => node.tag === "a").map((node) => [node.textContent, node.href ?? node.attributes.href]),
  };
};
function rolloutViews() {
  const [choose] = rollouts.find((node) => node.tag === "select");
  const steps = texts(choose.children), opened = steps[choose.value], views = {};
  function view(step, name) {
    choose.value = choose.children[steps.indexOf(step)].value;
    choose.listeners.input();
    views[name] = shown();
  }
  steps.forEach((step) => view(step, step));
  if (!labelled("search")) return { steps, opened, views };  // the page of a replay
  view(steps[0], steps[0]);
  rollouts.find((node) => node.attributes["aria-pressed"])[0].listeners.click();
  views.filtered = shown();
  rollouts.find((node) => node.attributes["aria-pressed"])[0].listeners.click();
  const search = labelled("search");
  search.value = " CALLS 42 ";
  view("all steps", "searched");
  search.value = "";
  view(steps[0], steps[0]);
  const more = rollouts.find(named("more"));
  if (more.length) more[0].listeners.click();
  views.unfolded = shown();
  return { steps, opened, views };
}
const header = (name) => texts((sections[name] ?? new Node(name)).find((node) => ["th", "td"].includes(node.tag)));
const drawn = (sections.curves?.find(named("card")) ?? []).map((card) => ({
  title: card.find((node) => node.tag === "h3")[0].textContent,
  lines: card.find((node) => node.tag === "path").map(({ attributes }) => [attributes.stroke, attributes.d]),
}));
console.log(JSON.stringify({
  results: header("results"), drawn, curves: sections.curves?.textContent, run: sections.run.textContent,
  header: sections.header.textContent, order: Object.keys(sections), ...(rollouts ? rolloutViews() : {}),
}));
