// ---- the page -------------------------------------------------------------------------------------------------------
const everNonZero = (key) => RUNS.some((run) => run.series[key]?.[1].some((value) => value !== 0));
// Titles of held-out scores: that of the whole, of a set if there are several, and of one reward function.
function heldOutCharts(keys, unit) {
  const middle = (key) => key.slice("eval/".length, key.lastIndexOf("/avg@")), names = keys.map(middle);
  const whole = (name) => names.find((other) => name.startsWith(`${other}/`)), sets = new Set(names.filter((name) => whole(name) === undefined));
  return keys.map((key) => {
    const name = middle(key), of = whole(name), set = sets.size > 1 ? of ?? name : "", twice = names.filter((other) => other === name).length > 1;
    const what = [set, of === undefined ? "" : name.slice(of.length + 1), twice ? key.slice(key.lastIndexOf("/") + 1) : ""].filter(Boolean).join(", ");
    const title = (of === undefined ? DATA.heldOut : "Held-out reward") + (what && `: ${what}`);
    return { of, chart: [key, title, { sub: of === undefined ? key : `${key}, this function alone`, unit: of === undefined ? unit : "reward", smoothable: false }] };
  });
}
function start() {
  const rewards = [...new Set(RUNS.flatMap((run) => run.rewards))], heldOutUnit = DATA.heldOut.replace("Held-out ", "");
  const heldOut = heldOutCharts([...new Set(RUNS.flatMap((run) => run.accuracy))], heldOutUnit);
  const wanted = [ // titles, units and meanings are those of metrics.py
    ["reward/mean"],
    ...heldOut.filter((one) => one.of === undefined).slice(0, 4).map((one) => one.chart),
    ...rewards.slice(0, 6).map((key) => [key, `Reward: ${key.slice(7, -5)}`, { sub: `${key}, this function alone` }]),
    ...heldOut.filter((one) => one.of !== undefined).slice(0, 6).map((one) => one.chart),
    [DATA.parityKey, "Parity", { sub: ["largest |log-prob of sampler − learner|, log scale above 0", ...parityNote()], symlog: true }],
    ["policy/entropy"], ["response_length/mean"], ["response_length/frac_truncated"], ["environment/turns_mean"],
    ["environment/frac_max_turns"], ["rollout/num_prompts_sampled"], ["policy/ref_kl"], ["critic/explained_variance"],
    ["critic/loss"], ["perf/memory_peak_gib_max", undefined, { smoothable: false }], ["perf/communication_s"],
    ["perf/rank_idle_max_s"],
    ...["environment/num_errors", "environment/num_timeouts"].filter(everNonZero).map((key) => [key, undefined, { smoothable: false }]),
  ];
  const main = [...wanted.map(([key, ...rest]) => lineChart(key, ...rest)), timeChart()].filter(Boolean);
  const drawn = new Set(wanted.map(([key]) => key));
  charts.push(...main);
  $("charts").append(...main.map((chart) => chart.node));
  $("zoom-reset").addEventListener("click", () => zoom());
  const longest = Math.max(0, ...RUNS.map((run) => run.series["reward/mean"]?.[0].length ?? 0));
  smoothing = longest > 60 ? 0.7 : 0;
  $("smoothing").value = smoothing;
  $("smoothing-value").textContent = smoothing;
  $("smoothing").addEventListener("input", (event) => {
    smoothing = Number(event.target.value);
    $("smoothing-value").textContent = smoothing;
    charts.forEach((chart) => chart.draw());
  });
  document.querySelectorAll(".swatch[data-run]").forEach((node) => node.replaceWith(swatch(Number(node.dataset.run))));
  if (RUNS.length > 1) $("legend").append(...RUNS.map((run, i) => {
    const node = el("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch(i), run.label);
    node.addEventListener("click", () => {
      if (hidden.has(i)) hidden.delete(i); else if (hidden.size < RUNS.length - 1) hidden.add(i);
      node.setAttribute("aria-pressed", !hidden.has(i));
      charts.forEach((chart) => chart.draw());
    });
    return node;
  }));
  const rest = [...new Set(RUNS.flatMap((run) => Object.keys(run.series)))].filter((key) => !drawn.has(key) && !key.startsWith("time/")).sort();
  $("more").hidden = !rest.length;
  $("more").addEventListener("toggle", () => {
    if ($("more-charts").children.length) return;
    const more = rest.map((key) => lineChart(key, key, { height: 172, symlog: key.startsWith("parity/") && !key.includes("frac_") })).filter(Boolean);
    charts.push(...more);
    $("more-charts").append(...more.map((chart) => chart.node));
    more.forEach((chart) => chart.draw());
  });
  let width = 0;
  new ResizeObserver(() => { // also draws the first time
    if (innerWidth === width) return;
    width = innerWidth;
    charts.forEach((chart) => chart.draw());
  }).observe(document.body);
  charts.forEach((chart) => chart.draw());
  sampleBrowser();
  traces();
  document.documentElement.dataset.drawn = "true";
}
start();
