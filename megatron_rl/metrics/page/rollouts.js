// Rollouts: groups of samples of one prompt, what they were worth, and the log-prob of every token.

const PAGE = 8, DARKEST = 5, LONG = 600, LONG_LINES = 8;
const ORDERS = [["", "as recorded"], ["down", "reward, highest first"], ["up", "reward, lowest first"], ["unsure", "least likely first"]];

function drawRollouts() {
  const section = document.getElementById("rollouts");
  section.append(el("h2", {}, "Rollouts"));
  if (!data.rollouts.length) {
    section.append(el("p", { class: "muted" }, "No rollouts were recorded."));
    return;
  }
  const steps = data.rollouts, samples = steps.map(flat), everything = samples.flat();
  const view = { shown: PAGE };
  const trained = steps.findLastIndex((step) => !step.held_out);
  const choose = options([...steps.map((step, index) => [index, step.label]), ["", "all steps"]]);
  choose.value = trained < 0 ? steps.length - 1 : trained;
  const environments = [...new Set(everything.map((sample) => sample.group.environment))];
  const environment = options([["", "all"], ...environments.map((name) => [name, name])]);
  const verdicts = [...new Set(everything.map((sample) => sample.verdict))].sort();
  const verdict = options([["", "all"], ...verdicts.map((name) => [name, words(name)])]);
  const search = el("input", { type: "search", placeholder: "Search prompts and answers", "aria-label": "search" });
  const low = el("input", { type: "number", step: "any", placeholder: "lowest", "aria-label": "lowest reward" });
  const high = el("input", { type: "number", step: "any", placeholder: "highest", "aria-label": "highest reward" });
  const order = options(ORDERS), colored = el("input", { type: "checkbox", checked: true });
  const list = el("div"), count = el("span", { class: "small muted" }), counts = el("div", { class: "row verdicts" });
  const before = el("button", { "aria-label": "previous step", onclick: () => move(-1) }, "\u2039");
  const after = el("button", { "aria-label": "next step", onclick: () => move(1) }, "\u203a");

  function move(by) { choose.value = Number(choose.value) + by; restart(); }
  function restart() { view.shown = PAGE; draw(); }
  function draw() {
    const all = choose.value === "", index = Number(choose.value), wanted = search.value.trim().toLowerCase();
    const here = all ? everything : samples[index];
    before.disabled = all || index === 0;
    after.disabled = all || index === steps.length - 1;
    const found = sorted(here.filter((sample) =>
      (!environment.value || sample.group.environment === environment.value) &&
      (!verdict.value || sample.verdict === verdict.value) &&
      inRange(sample.reward, low.value, high.value) && (!wanted || sample.text.includes(wanted))), order.value);
    const recorded = (all ? steps : [steps[index]]).reduce((sum, step) => sum + step.recorded, 0);
    count.textContent = `${number(times(found))} of ${number(times(here))} samples` +
      (recorded > times(here) ? ` (${number(recorded)} in the run directory)` : "");
    counts.replaceChildren(...verdicts.map((name) => [name, times(here.filter((sample) => sample.verdict === name))])
      .filter(([, often]) => often).sort((a, b) => b[1] - a[1]).map(([name, often]) => el("button", {
        "aria-pressed": String(verdict.value === name),
        onclick: () => { verdict.value = verdict.value === name ? "" : name; restart(); },
      }, `${words(name)} ${number(often)}`)));
    list.replaceChildren();
    let card = null;
    found.slice(0, view.shown).forEach((sample, at) => {
      if (sample.group !== found[at - 1]?.group) list.append(card = groupCard(sample.group, all, wanted));
      card.append(sampleCard(sample, colored.checked, wanted));
    });
    if (found.length > view.shown) {
      list.append(el("button", { class: "next", onclick: () => { view.shown += PAGE; draw(); } },
        `Show ${Math.min(PAGE, found.length - view.shown)} more`));
    }
    if (!found.length) list.append(el("p", { class: "muted" }, "No sample is like that."));
    hideTip();
  }

  for (const input of [choose, environment, verdict, search, low, high, order, colored]) input.addEventListener("input", restart);
  section.append(
    el("div", { class: "card" },
      el("div", { class: "row" }, el("span", { class: "steps" }, before, choose, after), search, count),
      el("details", { class: "filters", open: !NARROW }, el("summary", { class: "small" }, "Filters"),
        el("div", { class: "row" },
          environments.length > 1 ? el("label", {}, "Environment", environment) : null,
          el("label", {}, "Verdict", verdict), el("label", {}, "Reward", low, "to", high), el("label", {}, "Order", order),
          el("label", {}, colored, "Colour by log-prob"),
          el("span", { class: "row small muted scales" }, "0", el("span", { class: "scale" }), `\u2264 \u2212${DARKEST} nats`))),
      counts),
    list);
  list.addEventListener("pointermove", (event) => tokenTip(event));
  list.addEventListener("pointerleave", hideTip);
  draw();
}

function flat(step) {
  return step.groups.flatMap((group) => group.samples.map((sample) => ({
    ...sample, group: Object.assign(group, { label: step.label, step: step.step }),
    text: [group.prompt, group.task, group.gold, sample.prompt, sample.completion, sample.extracted,
      ...sample.branches.flatMap((branch) => [branch.read, branch.completion])].join("\n").toLowerCase(),
  })));
}

function times(samples) { return samples.reduce((sum, sample) => sum + sample.samples.length, 0); }

function words(verdict) { return verdict.replaceAll("_", " "); }

function options(pairs) {
  return el("select", {}, ...pairs.map(([value, text]) => el("option", { value }, text)));
}

function inRange(reward, low, high) {
  if (low === "" && high === "") return true;
  return reward !== null && (low === "" || reward >= Number(low)) && (high === "" || reward <= Number(high));
}

function sorted(samples, order) {
  const mean = (sample) => {
    const known = sample.logprobs.filter((value) => value !== null);
    return known.reduce((sum, value) => sum + value, 0) / Math.max(1, known.length);
  };
  const worst = -Infinity;
  if (order === "down") return samples.toSorted((a, b) => (b.reward ?? worst) - (a.reward ?? worst) || 0);
  if (order === "up") return samples.toSorted((a, b) => (a.reward ?? worst) - (b.reward ?? worst) || 0);
  if (order === "unsure") return samples.toSorted((a, b) => mean(a) - mean(b));
  return samples;
}

function groupCard(group, named, wanted) {
  const about = [
    group.number === null ? "" : `group ${group.number}`, group.mean === null ? "" : `mean reward ${number(group.mean)}`, plural(group.count, "sample"),
    group.correct === null ? "" : `${number(group.correct)} correct`, group.truncated ? `${number(group.truncated)} cut at the limit` : "",
    group.equal ? "zero-variance group: all rewards equal" : "",
  ].filter(Boolean).join(" \u00b7 ");
  return el("article", { class: "card group" },
    el("div", { class: "row" },
      named ? el("b", {}, group.label) : null,
      el("b", {}, group.environment), group.task === group.prompt ? null : el("span", { class: "muted" }, group.task),
      group.gold === null ? null : el("span", { class: "small" }, "right answer ", el("code", {}, group.gold)),
      el("span", { class: "small muted" }, about), ...replays(group)),
    folding(el("pre", { class: "prompt" }, group.prompt), group.prompt, wanted));
}

// Links to the pages that `megatron-rl replay` has made of the group or of its samples.
function replays(group) {
  const pages = data.replays?.[`${group.step}/${group.number}`] ?? [];
  return pages.map(([name, href]) => el("a", { class: "small", href }, name));
}

function plural(count, word) { return `${number(count)} ${word}${count === 1 ? "" : "s"}`; }

function sampleCard(sample, colored, wanted) {
  const tone = sample.correct === null ? "" : sample.correct ? "good" : "bad";
  const several = sample.samples.length > 1;
  const about = [
    ...facts(sample), sample.policy_version === null ? "" : `policy version ${sample.policy_version}`,
    sample.greedy ? "greedy" : several ? "" : `sample ${sample.samples[0]}`,
    sample.branches.length ? plural(1 + sample.branches.length, "sequence") : "",
  ].filter(Boolean).join(" \u00b7 ");
  return el("section", { class: "sample" },
    el("div", { class: "row" },
      el("span", { class: `badge ${tone}`, title: sample.by_reward ? "by the reward: the grader gives no verdict" : "" },
        words(sample.verdict)),
      sample.reward === null ? null : el("span", { class: "badge" }, `reward ${number(sample.reward)}`),
      several ? el("span", { class: "badge", title: `samples ${sample.samples.join(", ")}` }, `${sample.samples.length} identical`) : null,
      sample.finish_reason === "length" ? el("span", { class: "badge bad" }, "cut at the limit") : null,
      sample.extracted === null ? null : el("span", { class: "small" }, "answer ", el("code", {}, sample.extracted)),
      el("span", { class: "small muted" }, about)),
    sample.error ? el("div", { class: "small bad-text" }, sample.error) : null,
    sample.prompt === null ? null : folding(el("pre", { class: "prompt" }, sample.prompt), sample.prompt, wanted),
    folding(answer(sample, colored), sample.completion, wanted),
    ...sample.branches.map((branch) => branchView(branch, colored, wanted)));
}

// A further sequence of a sample: what is new in its prompt, and what the model wrote.
function branchView(branch, colored, wanted) {
  const origin = branch.shared ? `after the first ${plural(branch.shared, "token")} of sequence ${branch.of + 1}` : "new conversation";
  const about = [`sequence ${branch.number + 1}`, origin, ...facts(branch)].filter(Boolean).join(" \u00b7 ");
  return el("div", { class: "branch" },
    el("div", { class: "row" },
      branch.finish_reason === "length" ? el("span", { class: "badge bad" }, "cut at the limit") : null,
      el("span", { class: "small muted" }, about)),
    branch.read ? folding(el("pre", { class: "prompt" }, branch.read), branch.read, wanted) : null,
    folding(answer(branch, colored), branch.completion, wanted));
}

function facts(sequence) {
  const fed = sequence.spans.reduce((sum, [start, end]) => sum + end - start, 0);
  const cut = sequence.num_tokens > sequence.tokens.length ? `first ${number(sequence.tokens.length)} of ` : "";
  return [
    sequence.agent ? `${sequence.agent}: reward ${number(sequence.agent_reward)}` : "",
    sequence.advantage === null ? "" : `advantage ${number(sequence.advantage)}`,
    `${cut}${plural(sequence.num_tokens, "token")}`, fed ? `${number(fed)} of them from the environment` : "",
    sequence.finish_reason === "length" ? "" : `ended: ${words(sequence.finish_reason)}`,
  ];
}

function answer(sequence, colored) {
  return (colored || sequence.spans.length) && sequence.tokens.length
    ? tokenView(sequence, colored) : el("pre", { class: "answer" }, sequence.completion);
}

function folding(node, text, wanted) {
  if ((text.length <= LONG && text.split("\n").length <= LONG_LINES) || wanted) return node;
  node.className += " folded";
  const more = el("button", { class: "more", onclick: () => {
    const folded = node.className.endsWith(" folded");
    node.className = folded ? node.className.replace(" folded", "") : `${node.className} folded`;
    more.textContent = folded ? "less" : "more";
  } }, "more");
  return el("div", {}, node, more);
}

function tokenView(sample, colored) {
  const view = el("div", { class: "tokens answer" });
  let index = 0;
  for (const [start, end] of [...sample.spans, [sample.tokens.length, sample.tokens.length]]) {
    for (; index < start; index++) view.append(tokenSpan(sample, index, colored));
    if (start === end) break;
    const written = el("span", { class: "environment" });
    for (; index < end; index++) appendLines(written, sample.tokens[index]);
    written.token = { text: sample.tokens.slice(start, end).join(""), environment: true };
    view.append(written);
  }
  return view;
}

function tokenSpan(sample, index, colored) {
  const text = sample.tokens[index], span = el("span");
  appendLines(span, text);
  if (colored) span.style.background = tokenColor(sample, index);
  span.token = { text, sample, index };
  return span;
}

// Background of a token, and lines of its tip: by its log-prob, unless the page has other numbers.
let tokenColor = (sample, index) => {
  const logprob = sample.logprobs[index] ?? null;
  return logprob === null ? "" : `rgba(var(--heat), ${(0.85 * Math.min(1, -logprob / DARKEST)).toFixed(3)})`;
};
let tokenFacts = (sample, index) => {
  const logprob = sample.logprobs[index] ?? null;
  return [
    el("div", {}, logprob === null ? "no log-prob" : `log-prob ${logprob.toFixed(4)}`),
    logprob === null ? "" : el("div", { class: "muted" }, `probability ${number(Math.exp(logprob))}`),
  ];
};

function appendLines(node, text) {
  text.split("\n").forEach((part, at) => {
    if (at) node.append(el("em", {}, "\u21b5"), "\n");
    node.append(part);
  });
}

function tokenTip(event) {
  const token = event.target.closest(".tokens span")?.token;
  if (!token) { hideTip(); return; }
  if (token.environment) {
    showTip(event, [el("b", {}, "written by the environment"), el("div", { class: "muted" }, "not by the model: no log-prob, no loss")]);
    return;
  }
  showTip(event, [el("b", {}, JSON.stringify(token.text)), ...tokenFacts(token.sample, token.index)]);
}
