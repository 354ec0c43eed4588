// A group of a step again: tokens in the colour of a number of the reader's choice, and the gradient by layer.

function drawReplay() {
  const measure = options(data.measures.map(([name], index) => [index, name]));
  const sequences = data.group.samples.flatMap((sample) => [sample, ...sample.branches]);
  const ends = el("span", { class: "row small muted scales" });
  const list = el("div");

  function largest(index) {
    const neutral = data.measures[index][1];
    return Math.max(...sequences.flatMap((one) => one.numbers.map((all) => all === null ? 0 : Math.abs(all[index] - neutral))), 0);
  }

  tokenColor = (sequence, place) => {
    const index = Number(measure.value), value = sequence.numbers[place]?.[index];
    const share = (value - data.measures[index][1]) / largest(index);
    return Number.isFinite(share) ? `rgba(var(--${share < 0 ? "cool" : "heat"}), ${(0.85 * Math.abs(share)).toFixed(3)})` : "";
  };

  tokenFacts = (sequence, place) => sequence.numbers[place] === null
    ? [el("div", { class: "muted" }, "not in the loss of this update")]
    : data.measures.map(([name], index) => el("div", {}, `${name} ${number(sequence.numbers[place][index])}`));

  function drawSamples() {
    const index = Number(measure.value), neutral = data.measures[index][1], most = largest(index);
    ends.replaceChildren(number(neutral - most), el("span", { class: "scale signed" }), number(neutral + most));
    const card = groupCard(data.group, false, "");
    card.append(...data.group.samples.map((sample) => sampleCard(sample, true, "")));
    list.replaceChildren(card);
    hideTip();
  }

  document.title = `${data.name} \u2013 replay of step ${data.step}`;
  document.getElementById("header").append(el("h1", {}, `${data.name}, step ${data.step}, replayed`), el("p", { class: "muted" },
    data.update === null ? "Not in the loss: no reward variance in the group, a failed grade, or no update in this step."
      : `Update ${data.update} of the step; the denominator of its loss is ${number(data.denominator)}.`));
  measure.addEventListener("input", drawSamples);
  list.addEventListener("pointermove", tokenTip);
  list.addEventListener("pointerleave", hideTip);
  document.getElementById("rollouts").append(
    el("div", { class: "card row" }, el("label", {}, "Colour by", measure), ends,
      el("span", { class: "small muted" }, "gradient: norm of the loss's gradient at the hidden state from which the token was predicted")),
    list);
  drawSamples();
  document.getElementById("run").append(
    el("h2", {}, "Gradient by layer"),
    el("div", { class: "card scroll" }, table(["part", "norm before clipping"], data.norms.map(([part, norm]) => [part, number(norm)]))),
    el("h2", {}, "Against what the run recorded"),
    el("div", { class: "card scroll" }, table(["", "recorded", "replayed"], data.compared)));
}

drawReplay();
