"use strict";
// What every script of a page uses: elements, numbers, tables, the tip at the pointer.

const data = JSON.parse(document.getElementById("report-data").textContent);
const tip = document.getElementById("tip");
const NARROW = innerWidth < 700;  // a phone: what is not needed at first is folded, so that its first screen has a curve

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e15 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function tickLabel(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return Number((value / 1e9).toPrecision(3)) + "G";
  if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
  if (size !== 0 && size < 5e-3) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(6)));
}

const color = (series, index) => `var(--c${(series.color ?? index) % 8})`;

function showTip(event, children) {
  tip.replaceChildren(...children);
  tip.style.display = "block";
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function hideTip() { tip.style.display = "none"; }

function fold(title, content, note) {
  return el("details", { class: "card", open: !NARROW }, el("summary", {}, title), el("div", { class: "scroll" }, content), note);
}

function table(headers, rows) {
  return el("table", {},
    el("thead", {}, el("tr", {}, ...headers.map((name) => el("th", {}, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}
