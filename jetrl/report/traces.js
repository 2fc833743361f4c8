// ---- traces: each conversation of a step as a tree of turns ---------------------------------------------------------
const ROLES = { system: "System", user: "User", tool: "Tool", assistant: "Assistant", environment: "Environment", policy: "Policy" };
const roleClass = (role) => Object.hasOwn(ROLES, role) ? role : "environment"; // a role is anyone's text: never a class as it is
const roleName = (role) => Object.hasOwn(ROLES, role) ? ROLES[role] : role;

// The messages of an environment's text, [role, text] each; without roles, all of it is the environment's.
function messagesOf(text, said) {
  const left = [...text];
  if (!said) return [["environment", text]];
  let at = 0;
  return said.map(([role, length]) => {
    const one = left.slice(at, at + length).join("");
    at += length;
    return [role, one.replace(/\n$/, "")];
  });
}
// A row as nodes. Each turn follows the one before it, or the one that it names; -1 is a prompt anew, beside the first.
function treeOf(row, prompt) {
  const top = { by: "top", children: [], turn: 0 }, nodes = [];
  const root = { by: "prompt", c: row.p ?? prompt, m: row.pm, parent: top, children: [], turn: 0 };
  top.children.push(root);
  for (const part of row.turns) {
    const parent = part.after === undefined ? nodes.at(-1) ?? root : part.after < 0 ? top : nodes[part.after] ?? root;
    const node = { ...part, part, parent, children: [], turn: parent.turn + (part.by === "policy") };
    parent.children.push(node);
    nodes.push(node);
  }
  return { top, root, nodes };
}
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
function policyFacts(node) {
  const known = node.t.map((_, k) => node.l[k]).filter((value) => value !== null && value !== undefined), shown = [];
  if (known.length) {
    shown.push(fact("log-prob, mean", number(mean(known), false, 3)), fact("lowest", number(Math.min(...known), false, 3)));
  }
  if (node.v?.length) shown.push(fact("advantage, mean", signed(mean(node.v))));
  const versions = [...new Set((node.w ?? []).map(([, version]) => version))];
  if (versions.length) shown.push(fact("weight version", versions.join(", ")));
  return shown;
}
function badge(role) { return el("b", { className: `badge ${roleClass(role)}`, textContent: roleName(role) }); }
function nodeParts(node, plain) {
  if (node.by === "top") return [];
  if (node.by !== "policy") {
    const said = messagesOf(node.c, node.m).map(([role, text]) => el("div", { className: `node ${roleClass(role)}` },
      el("p", { className: "who" }, badge(role), ...(node.by === "prompt" ? [el("span", { textContent: "prompt" })] : [])),
      el("div", { className: "theirs", textContent: text })));
    const left = node.n === undefined ? 0 : node.n - [...node.c].length;
    if (left > 0) said.at(-1)?.append(sign(` … ${many(left, "more character")}`));
    return said;
  }
  const who = el("p", { className: "who" }, badge("policy"), el("span", { textContent: `turn ${node.turn}` }), el("span", { textContent: many(node.n, "token") }), ...policyFacts(node));
  if (node.r !== null) who.append(fact("reward", signed(node.r), node.r > 0 ? "good" : node.r < 0 ? "bad" : ""));
  return [el("div", { className: "node policy" }, who, policyText(node.part, plain))];
}
// The nodes from this one on, in order; where several turns follow, each is a branch of its own.
function branchNodes(node, plain) {
  const shown = [];
  for (let at = node; at !== undefined; at = at.children.length === 1 ? at.children[0] : undefined) {
    shown.push(...nodeParts(at, plain));
    if (at.children.length > 1) {
      at.children.forEach((child, k) => shown.push(el("details", { className: "branch", open: true },
        el("summary", { textContent: `Branch ${k + 1} of ${at.children.length}` }), ...branchNodes(child, plain))));
    }
  }
  return shown;
}
function traceCard(row, prompt, promptRead, plain) {
  const { top, nodes } = treeOf(row, prompt), forks = nodes.filter((node) => node.parent.children.length > 1 && node.parent.children[0] !== node).length;
  const head = el("div", { className: "facts" }, ...facts(row), ...(forks ? [fact("forks", forks)] : []));
  const read = row.pr ?? promptRead;
  return [el("div", { className: "completion" }, head), ...(plain ? [] : [heatLegend()]), ...(read === undefined ? [] : [rendered(read)]),
    ...branchNodes(top, plain), ...(row.e ? [el("p", { className: "failure", textContent: row.e.trim() })] : [])];
}
// One bar for a conversation: a piece for each message, as wide as its text, in the colour of who wrote it.
function laneOf(row, prompt) {
  const { root, nodes } = treeOf(row, prompt), bar = el("span", { className: "lane" });
  const piece = (role, size) => bar.append(el("i", { className: roleClass(role), style: `flex-grow:${Math.max(Math.sqrt(size), 1).toFixed(2)}` }));
  for (const node of [root, ...nodes]) {
    if (node.by === "policy") piece("policy", node.t.reduce((sum, token) => sum + token.length, 0));
    else for (const [role, text] of messagesOf(node.c, node.m)) piece(role, text.length);
  }
  return bar;
}
function traces() {
  const sets = { samples: "training", evaluations: "held-out" };
  const talks = (all) => all.map((one) => ({ step: one.step, talks: one.groups.flatMap((group) => group.rows.filter((row) => row.turns).map((row) => ({ row, group }))) }))
    .filter((one) => one.talks.length);
  const having = RUNS.map((run) => ({ label: run.label, samples: talks(run.samples.steps), evaluations: talks(run.evaluations.steps) }))
    .filter((run) => run.samples.length || run.evaluations.length);
  if (!having.length) return;
  $("traces").hidden = false;
  const runBox = $("trace-run"), setBox = $("trace-set"), stepBox = $("trace-step");
  runBox.append(...having.map((run, k) => el("option", { value: k, textContent: run.label })));
  $("trace-run-box").hidden = having.length < 2;
  let steps = [], at = 0, chosen = 0, set = "samples";
  function showTalk() {
    const { row, group } = steps[at].talks[chosen];
    [...$("trace-list").children].forEach((node, k) => node.setAttribute("aria-current", k === chosen));
    $("trace").replaceChildren(...traceCard(row, group.prompt, group.rendered, $("trace-plain").checked));
  }
  function showStep() {
    stepBox.value = at;
    $("trace-back").disabled = at === 0;
    $("trace-on").disabled = at === steps.length - 1;
    chosen = Math.min(chosen, steps[at].talks.length - 1);
    $("trace-list").replaceChildren(...steps[at].talks.map(({ row, group }, k) => {
      const asked = messagesOf(row.p ?? group.prompt, row.pm).at(-1)[1];
      const said = el("span", { className: "one", textContent: asked.replace(/\s+/g, " ").trim() || "no prompt" });
      const turns = many(row.turns.filter((part) => part.by === "policy").length, "turn");
      const end = (failed(row) ? ending(row) : `reward ${scored(row.r)}`) + (row.id === undefined ? "" : ` · ${row.id}`);
      const node = el("button", { type: "button" }, said, laneOf(row, group.prompt), el("small", { textContent: `${turns} · ${end}` }));
      node.addEventListener("click", () => { chosen = k; showTalk(); });
      return node;
    }));
    showTalk();
  }
  function showRun() {
    const run = having[runBox.value || 0];
    setBox.replaceChildren(...Object.entries(sets).filter(([key]) => run[key].length).map(([key, name]) => el("option", { value: key, textContent: name, selected: key === set })));
    set = setBox.value;
    $("trace-set-box").hidden = setBox.children.length < 2 && set === "samples";
    steps = run[set];
    stepBox.replaceChildren(...steps.map((one, k) => el("option", { value: k, textContent: one.step })));
    at = steps.length - 1; chosen = 0;
    const roles = new Set(steps.flatMap((one) => one.talks).flatMap(({ row }) => [row.pm, ...row.turns.map((part) => part.m ?? (part.by === "policy" ? [["policy"]] : undefined))])
      .flatMap((said) => said ? said.map(([role]) => roleClass(role)) : ["environment"]));
    $("trace-legend").replaceChildren(...Object.keys(ROLES).filter((role) => roles.has(role)).map((role) => el("span", {}, el("i", { className: role }), ROLES[role])));
    showStep();
  }
  runBox.addEventListener("change", showRun);
  setBox.addEventListener("change", () => { set = setBox.value; showRun(); });
  stepBox.addEventListener("change", () => { at = Number(stepBox.value); showStep(); });
  $("trace-back").addEventListener("click", () => { at = Math.max(at - 1, 0); showStep(); });
  $("trace-on").addEventListener("click", () => { at = Math.min(at + 1, steps.length - 1); showStep(); });
  $("trace-plain").addEventListener("change", showTalk);
  showRun();
}
