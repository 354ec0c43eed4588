// Runs the script of a report without a browser: `node page.js report.html` prints what the page would show.
// As much of a DOM as the page asks for: elements, attributes, text, listeners.
"use strict";
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const [, stored] = page.match(/id="report-data">([^]*?)<\/script>/);
const [, script] = page.match(/<script>\n([^]*?)<\/script>/);

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
global.ResizeObserver = class { observe() {} };
document.getElementById("report-data").textContent = stored;
new Function(script)();

const rollouts = sections.rollouts;
const texts = (nodes) => nodes.map((node) => node.textContent);
const coloured = (article) => texts(article.find((node) => node.tag === "span" && node.style.background));
const shown = () => {
  const articles = rollouts.find((node) => node.tag === "article");
  return {
    counts: texts(rollouts.find((node) => node.attributes["aria-pressed"])),
    samples: texts(articles),
    environment: texts(rollouts.find((node) => node.className === "environment")),
    coloured: coloured(articles[0]),
    coloured_of_second: articles[1] ? coloured(articles[1]) : [],
  };
};
const [choose] = rollouts.find((node) => node.tag === "select");
const steps = texts(choose.children), opened = steps[choose.value], views = {};
steps.forEach((step, index) => {
  choose.value = index;
  choose.listeners.input();
  views[step] = shown();
});
choose.value = 0;
choose.listeners.input();
rollouts.find((node) => node.attributes["aria-pressed"])[0].listeners.click();
views[`${steps[0]}, filtered`] = shown();
const evaluation = texts(sections.evaluation.find((node) => ["th", "td"].includes(node.tag)));
console.log(JSON.stringify({ evaluation, steps, opened, views }));
