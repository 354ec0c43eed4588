// Runs beside each other: results, curves over each other in a colour a group, and the settings that differ.

document.title = "Runs compared";
document.getElementById("header").append(
  el("h1", {}, "Runs compared"),
  el("div", { class: "legend" }, ...data.groups.map((name, index) =>
    el("span", {}, el("i", { style: `background:${color({}, index)}` }), name))));
document.getElementById("results").append(fold("Results", table(data.results.headers, data.results.rows),
  el("div", { class: "small muted" }, "Mean \u00b1 standard deviation over runs that differ in their seed. Of the curves the mean, and a band from the lowest to the highest.")));
drawCurves();
document.getElementById("run").append(
  el("h2", {}, "Settings that differ"),
  data.settings.rows.length
    ? el("div", { class: "card scroll" }, table(data.settings.headers, data.settings.rows))
    : el("p", { class: "muted" }, "All settings are the same."));
