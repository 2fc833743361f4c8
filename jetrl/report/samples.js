// ---- samples --------------------------------------------------------------------------------------------------------
const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
const many = (n, one, more = `${one}s`) => `${n.toLocaleString("en-US")} ${n === 1 ? one : more}`;
const fact = (name, value, className = "") => el("span", {}, `${name} `, el("b", { className, textContent: value }));
const sign = (text) => el("i", { className: "sign", textContent: text });

// Tokens of the policy, coloured by probability: t tokens, l log-probs, v advantages (if each token has its own).
function tokenNodes(part) {
  return part.t.map((token, k) => {
    const lp = part.l[k], p = lp === null ? null : Math.min(Math.exp(lp), 1);
    const span = el("span", { style: p === null ? "" : `background: rgba(var(--heat), ${((1 - p) * 0.8).toFixed(3)})` });
    for (const piece of token.split(/(\n|\t)/)) {
      if (piece === "\n" || piece === "\t") span.append(sign(piece === "\n" ? "⏎" : "⇥"));
      span.append(piece);
    }
    if (token === "") span.append(sign("∅"));
    const line = (name, text, tag = "b") => el("p", {}, el("span", { textContent: name }), el(tag, { textContent: text }));
    const rows = () => [
      line("token", JSON.stringify(token), "code"),
      line("probability", p === null ? "not recorded" : p.toFixed(p < 0.01 ? 5 : 3)),
      line("log-prob", lp === null ? "not recorded" : lp.toFixed(4)),
      ...(part.v ? [line("advantage", signed(part.v[k]))] : [])];
    span.addEventListener("pointermove", (event) => showTip(event, ...rows()));
    span.addEventListener("pointerdown", (event) => showTip(event, ...rows()));
    span.addEventListener("pointerleave", hideTip);
    return span;
  });
}
function policyText(part, plain) {
  const body = el("div", { className: "tokens" });
  if (plain || !part.t.length) body.textContent = part.c ?? part.t.join("");
  else body.append(...tokenNodes(part));
  const left = part.n - part.t.length;
  if (left > 0 && !(plain && part.c)) body.append(sign(` … ${many(left, "more token")}`));
  return body;
}
function environmentText(part) {
  const body = el("div", { className: "theirs", textContent: part.c });
  const left = part.n - [...part.c].length;
  if (left > 0) body.append(sign(` … ${many(left, "more character")}`));
  return body;
}
function turnNode(part, turn, plain) {
  const policy = part.by === "policy", who = el("p", { className: "who" }, el("b", { textContent: policy ? "Policy" : "Environment" }));
  if (policy) who.append(el("span", { textContent: `turn ${turn}` }), el("span", { textContent: many(part.n, "token") }));
  if (part.r !== null) who.append(fact("reward", signed(part.r), part.r > 0 ? "good" : part.r < 0 ? "bad" : ""));
  return el("div", { className: `turn ${part.by}` }, who, policy ? policyText(part, plain) : environmentText(part));
}
const failed = (row) => row.f === "error" || row.f === "timeout";
const brief = (text) => { // the first line, if short
  const first = text.trim().split("\n")[0];
  return first.length > 80 ? `${first.slice(0, 80)}…` : first;
};
const ending = (row) => (row.f === "timeout" ? "time-out" : row.f) + (row.e ? `: ${brief(row.e)}` : "");
const scored = (value) => value === null ? "not scored" : number(value);
function facts(row) {
  const shown = [];
  if (!failed(row)) {
    shown.push(fact("reward", scored(row.r)));
    for (const [name, value] of Object.entries(row.rs ?? {})) shown.push(el("span", { className: "part" }, `${name} `, el("b", { textContent: scored(value) })));
    if (row.a !== undefined) shown.push(fact("advantage", row.a === null ? "–" : signed(row.a), row.a > 0 ? "good" : row.a < 0 ? "bad" : ""));
  }
  shown.push(fact("end", ending(row), row.f === "stop" ? "" : "bad"));
  if (row.turns) shown.push(fact("turns", row.turns.filter((part) => part.by === "policy").length));
  shown.push(fact("tokens", row.n.toLocaleString("en-US")));
  if (row.id !== undefined) shown.push(fact("session", row.id), fact("began", row.when), ...(row.open ? [fact("state", "not ended")] : []));
  return shown;
}
// What a reward has logged about the completion, and the prompt as the policy read it where it is this row's own.
function extras(row) {
  const logged = Object.entries(row.x ?? {}).map(([name, text]) => el("span", {}, `${name}: `, el("code", { textContent: text })));
  return [...(logged.length ? [el("div", { className: "facts extra" }, ...logged)] : []), ...(row.pr === undefined ? [] : [rendered(row.pr)])];
}
const heatLegend = () => el("div", { className: "heat-legend" }, "token probability 0", el("i"), "1");
function rendered(text) {
  return el("details", { className: "rendered" }, el("summary", { textContent: "Prompt as the policy reads it" }), el("pre", { textContent: text }));
}
function sampleNode(row, plain, open) {
  if (!row.turns) return el("div", { className: "completion" }, el("div", { className: "facts" }, ...facts(row)), policyText(row, plain), ...extras(row));
  const node = el("details", { className: "completion", open }, el("summary", { className: "facts" }, ...facts(row)));
  if (row.p !== undefined) node.append(el("h3", { textContent: "Its prompt" }), el("p", { className: "text prompt", textContent: row.p }));
  node.append(...extras(row));
  let turn = 0;
  for (const part of row.turns) node.append(turnNode(part, part.by === "policy" ? ++turn : turn, plain));
  if (row.e && row.e.trim() !== brief(row.e)) node.append(el("p", { className: "failure", textContent: row.e.trim() }));
  return node;
}
function sampleBrowser() {
  const sets = { samples: "training", evaluations: "held-out" };
  const having = RUNS.filter((run) => run.samples.steps.length || run.evaluations.steps.length);
  if (!having.length) return;
  $("samples").hidden = false;
  const setBox = $("sample-set"), runBox = $("sample-run"), stepBox = $("sample-step"), failedBox = $("failed-only");
  runBox.append(...having.map((run, k) => el("option", { value: k, textContent: run.label })));
  $("sample-run-box").hidden = having.length < 2;
  $("failed-box").hidden = !having.some((run) => run.samples.steps.some((one) => one.groups.some((group) => group.rows.some(failed))));
  let steps = [], at = 0, group = 0, set = "samples";
  const flat = (text) => text.replace(/\s+/g, " ").trim();
  const worth = (row) => failed(row) ? -Infinity : row.r ?? -Number.MAX_VALUE; // best reward first, failed ones last
  function describe(one) {
    const counted = one.rows.filter((row) => row.r !== null), broken = one.rows.filter(failed).length;
    const parts = [counted.length ? `mean reward ${number(counted.reduce((sum, row) => sum + row.r, 0) / counted.length)}` : "no reward"];
    if (one.rows.length > counted.length + broken) parts.push(`${one.rows.length - counted.length - broken} not scored`);
    if (broken) parts.push(`${broken} failed`);
    if (one.answer) parts.push(`answer ${flat(one.answer).slice(0, 24)}`);
    return parts.join(" · ");
  }
  function showGroup() {
    const one = steps[at].groups[group], plain = $("plain-text").checked;
    [...$("groups").children].forEach((node, k) => node.setAttribute("aria-current", k === group));
    const best = [...one.rows].sort((a, b) => worth(b) - worth(a));
    const part = (title, text) => [el("h3", { textContent: title }), el("p", { className: "text prompt", textContent: text })];
    const kind = best.some((row) => row.turns) ? "Conversations" : "Completions";
    $("group").replaceChildren(...(one.prompt ? part("Prompt", one.prompt) : []), ...(one.rendered === undefined ? [] : [rendered(one.rendered)]), ...(one.answer ? part("Answer", one.answer) : []),
      el("h3", { textContent: `${kind} (${best.length}, best reward first)` }), ...(plain ? [] : [heatLegend()]),
      ...best.map((row, k) => sampleNode(row, plain, k === 0 || failedBox.checked)));
  }
  function showStep() {
    stepBox.value = at;
    $("step-back").disabled = at === 0;
    $("step-on").disabled = at === steps.length - 1;
    group = Math.min(group, steps[at].groups.length - 1);
    const rewards = steps[at].groups.flatMap((one) => one.rows).map((row) => row.r).filter((r) => r !== null);
    const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards), part = (v) => 100 * v / (high - low);
    const bar = (r) => el("b", { className: r < 0 ? "below" : "", style: `left:${part(Math.min(r, 0) - low)}%;width:${part(Math.abs(r))}%` });
    $("groups").replaceChildren(...steps[at].groups.map((one, k) => {
      const bars = el("span", { className: "bar" }, ...one.rows.map((row) => failed(row) ? el("i", { className: "failed" })
        : row.r === null ? el("i", { className: "unscored", title: "not scored" }) : el("i", {}, bar(row.r))));
      const node = el("button", { type: "button" }, el("span", { className: "one", textContent: flat(one.prompt) || "no prompt" }), bars,
        el("small", { textContent: describe(one) }));
      node.addEventListener("click", () => { group = k; showGroup(); });
      return node;
    }));
    showGroup();
  }
  const onlyFailed = (all) => all
    .map((one) => ({ ...one, groups: one.groups.map((held) => ({ ...held, rows: held.rows.filter(failed) })).filter((held) => held.rows.length) }))
    .filter((one) => one.groups.length);
  function showRun() {
    const run = having[runBox.value || 0];
    setBox.replaceChildren(...Object.entries(sets).filter(([key]) => run[key].steps.length).map(([key, name]) => el("option", { value: key, textContent: name, selected: key === set })));
    set = setBox.value;
    $("sample-set-box").hidden = setBox.children.length < 2 && set === "samples";
    $("sample-note").hidden = set !== "samples";
    $("held-out-note").hidden = set !== "evaluations";
    const all = run[set].steps;
    steps = failedBox.checked ? onlyFailed(all) : all;
    $("no-failed").hidden = steps.length > 0;
    $("browser").hidden = !steps.length;
    stepBox.replaceChildren(...steps.map((one, k) => el("option", { value: k, textContent: one.step })));
    at = steps.length - 1; group = 0;
    if (steps.length) showStep();
    else for (const id of ["step-back", "step-on"]) $(id).disabled = true;
  }
  runBox.addEventListener("change", showRun);
  setBox.addEventListener("change", () => { set = setBox.value; showRun(); });
  failedBox.addEventListener("change", showRun);
  stepBox.addEventListener("change", () => { at = Number(stepBox.value); showStep(); });
  $("step-back").addEventListener("click", () => { at = Math.max(at - 1, 0); showStep(); });
  $("step-on").addEventListener("click", () => { at = Math.min(at + 1, steps.length - 1); showStep(); });
  $("plain-text").addEventListener("change", showGroup);
  showRun();
}
