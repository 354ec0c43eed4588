// The report: header and results, then curves and rollouts, and folded at the end how the run was made.

function drawHeader() {
  document.title = `${data.name} \u2013 run report`;
  const tone = data.status === "finished" ? "good" : data.status === "failed" ? "bad" : "";
  const parts = [
    el("div", { class: "row" },
      el("h1", {}, data.name), data.status ? el("span", { class: `badge ${tone}` }, data.status) : null,
      data.progress ? el("span", { class: "muted" }, data.progress) : null),
    data.error ? el("p", { class: "bad-text" }, data.error) : null,
    el("div", { class: "figures" }, ...data.figures.map(([name, value]) =>
      el("div", { class: "figure" }, el("span", { class: "small muted" }, name), el("b", {}, value)))),
    ...data.alarms.map((text) => el("p", { class: "bad-text" }, text)),
  ];
  document.getElementById("header").append(...parts.filter((part) => part !== null));
}

function drawResults() {
  const cards = [];
  if (data.evaluation) {
    cards.push(fold(`Held-out results, step ${data.evaluation.step}`, table(data.evaluation.headers, data.evaluation.rows),
      el("div", { class: "small muted" },
        "\u00b1 is half of the 95 % interval over tasks. avg@k, the mean share of k samples that are right, is pass@1.")));
  }
  if (data.training.rows.length) {
    cards.push(fold("Training by environment", table(data.training.headers, data.training.rows),
      el("div", { class: "small muted" }, data.training.note)));
  }
  document.getElementById("results").append(...cards);
}

function drawRun() {
  const list = el("dl", { class: "facts" });
  for (const [name, value] of Object.entries(data.facts)) {
    list.append(el("dt", {}, name), el("dd", { class: name === "command" || name === "commit" ? "mono" : "" }, number(value)));
  }
  const columns = ["first", "last", "lowest", "highest"];
  const rows = data.table.map((row) => [row.chart, row.line, ...columns.map((column) => number(row[column]))]);
  document.getElementById("run").append(
    el("h2", {}, "Run"),
    el("details", { class: "card" }, el("summary", {}, "Command, versions, totals"), list),
    el("details", { class: "card wide" }, el("summary", {}, "All curves in numbers"),
      el("div", { class: "scroll" }, table(["chart", "line", ...columns], rows))));
}

drawHeader();
drawResults();
drawCurves();
drawRollouts();
drawRun();
