// Takes what the server says, keeps it, and shows it. A message has everything, or what has changed since the one before.
"use strict";

const find = id => document.getElementById(id);
const runs = [];
let chosen = 0, bytesBy = "link", bars = [], due = false;

const charts = {
  lossTime: new Lines(find("loss-time"), format.at, format.number, { together: "time", range: around }),
  lossSamples: new Lines(find("loss-samples"), format.number, format.number, { range: around }),
  up: new Lines(find("bytes-up"), format.at, n => `${format.bytes(n)}/s`, { together: "time" }),
  down: new Lines(find("bytes-down"), format.at, n => `${format.bytes(n)}/s`, { together: "time" }),
  busy: new Lines(find("busy"), format.at, format.percent, { together: "time" }),
  queue: new Lines(find("queue"), format.at, format.number, { together: "time" }),
  lag: new Lines(find("lag"), format.at, format.number, { together: "time" }),
};
const timeline = new Timeline(find("timeline")), staleness = new Staleness(find("staleness"));

// -- what the server says --------------------------------------------------------------------------------------------

function take(message) {
  bars = message.bars;
  message.runs.forEach((news, number) => {
    const run = runs[number] ??= {};
    Object.assign(run, news, { times: merged(run.times, news.times) });
  });
  runs.compared = message.compared;
  if (!due) {
    due = true;
    requestAnimationFrame(() => { due = false; show(); });
  }
}

/** Replace the series of an axis from a span on. */
function merged(before, news) {
  if (!before || news.from === 0) return news;
  for (const [name, series] of Object.entries(news.series))
    for (const [key, values] of Object.entries(series)) {
      const kept = before.series[name]?.[key] ?? [];
      kept.length = Math.min(kept.length, news.from);
      series[key] = kept.concat(values);
    }
  return news;
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = event => {
    find("connection").textContent = "";
    take(JSON.parse(event.data));
  };
  source.onerror = () => {
    find("connection").textContent = "Not connected: this is the last that was told. `paceline dashboard` shows it anew.";
  };
}

// -- lines from series -----------------------------------------------------------------------------------------------

const places = axis => Array.from({ length: axis.num }, (_, place) => (place + 0.5) * axis.width);
const ratio = (above, below) => above.map((value, place) => value == null || !below[place] ? null : value / below[place]);

/** The number of samples (or steps) of all workers by the middle of each span. */
function counted(axis) {
  let all = 0;
  return Array.from({ length: axis.num }, (_, place) => {
    const num = axis.series.num?.[""]?.[place] ?? 0;
    all += num;
    return all - num / 2;
  });
}

function lossLine(run, x, number) {
  const { loss, losses, low, high } = run.times.series;
  if (!loss) return [];
  const name = runs.length > 1 ? run.label : "mean of the workers, and from the least to the most";
  const line = { name, colour: colour(number), x: x(run.times), y: ratio(loss[""], losses[""]), low: low[""], high: high[""] };
  const kept = line.y.map((_, place) => place).filter(place => line.y[place] != null);
  for (const each of ["x", "y", "low", "high"]) line[each] = kept.map(place => line[each][place]);
  return [line];
}

/** Lines of those keys that have most, and one of all others. */
function most(axis, name, label, scale, num = 7) {
  const series = axis.series[name] ?? {}, sum = key => sumFrom(series[key], 0);
  const keys = Object.keys(series).sort((a, b) => sum(b) - sum(a)), first = keys.slice(0, num), rest = keys.slice(num);
  const line = (text, values, hue) => ({ name: text, colour: hue, x: places(axis), y: values.map(v => v == null ? null : v * scale) });
  const lines = first.sort((a, b) => a - b || (a > b) - (a < b)).map((key, place) => line(label(key), series[key], colour(place)));
  if (rest.length) {
    const others = Array.from({ length: axis.num }, (_, place) => rest.reduce((all, key) => all + (series[key][place] ?? 0), 0) / rest.length);
    lines.push(line(`mean of ${rest.length} others`, others, style("--wire")));
  }
  return lines;
}

const colour = number => seriesColours()[number % seriesColours().length];

// -- what is shown ---------------------------------------------------------------------------------------------------

function show() {
  const run = runs[chosen], { times, now } = run;
  showVerdicts();
  charts.lossTime.show(runs.flatMap((each, number) => lossLine(each, places, number)));
  charts.lossSamples.show(runs.flatMap((each, number) => lossLine(each, counted, number)));
  showLoss();
  find("loss-unit").textContent = run.unit || "samples";
  showChoice();
  showNumbers(run);
  const blamed = /^worker (\d+)$/.exec(now.verdict?.subject ?? "")?.[1];
  timeline.show(times, run.events, blamed);
  staleness.show(times, bars);
  showWorkers(now.workers ?? [], blamed, run.state === "ended");
  const byLink = bytesBy === "link", label = byLink ? key => `worker ${key}` : key => key || "others";
  charts.up.show(most(times, byLink ? "up" : "pushed", label, 1 / times.width));
  charts.down.show(most(times, byLink ? "down" : "pulled", label, 1 / times.width));
  charts.busy.show(most(times, "busy", key => `server ${key}`, 1 / times.width));
  charts.queue.show(most(times, "queue", key => `server ${key}`, 1));
  find("lag-figure").hidden = !times.series.lag;
  if (times.series.lag) charts.lag.show(most(times, "lag", key => `server ${key}`, 1));
  showServers(now.servers ?? [], now.verdict?.subject);
  showEvents(run.events);
  document.title = `${runs.length > 1 ? `${runs.length} runs` : now.verdict?.text ?? "Paceline"} · Paceline`;
}

function showVerdicts() {
  const lines = runs.map((run, number) => {
    const verdict = run.now.verdict ?? {}, healthy = ["healthy", "starting"].includes(verdict.kind);
    const unsure = run.state === "reading" || verdict.kind === "starting";
    const line = node("span", `run ${unsure ? "unsure" : healthy ? "" : "bad"}`);
    if (runs.length > 1) line.append(swatch(colour(number)), node("span", "name", run.label));
    const over = run.state === "ended" ? `ended after ${format.at(run.elapsed_s)}; its last steps: ` : "";
    const text = run.state === "reading" ? `reading what it has written: ${format.percent(run.read_share)}` : over + (verdict.text ?? "");
    line.append(node("span", "verdict", text));
    return line;
  });
  replace(find("runs"), lines);
  find("runs").classList.toggle("several", runs.length > 1);
  replace(find("compared"), runs.compared.map((text, number) => {
    const item = node("li", "", "");
    item.append(node("b", "", `${runs[0].label} and ${runs[number + 1].label}: `), text);
    return item;
  }));
}

/** How the loss goes, in a sentence on each run. */
function showLoss() {
  const told = runs.filter(run => run.now.loss?.text);
  replace(find("loss-verdict"), told.map(run => {
    const line = node("span", ["rises", "not finite"].includes(run.now.loss.trend) ? "bad" : "");
    line.append(...(runs.length > 1 ? [swatch(colour(runs.indexOf(run))), ` ${run.label}: `] : []), run.now.loss.text);
    return line;
  }));
}

function showChoice() {
  if (runs.length < 2) return;
  const nav = find("choice");
  if (nav.children.length !== runs.length)
    nav.replaceChildren(...runs.map((run, number) => {
      const button = node("button", "");
      button.type = "button";
      button.append(swatch(colour(number)), run.label);
      button.onclick = () => { chosen = number; show(); };
      return button;
    }));
  [...nav.children].forEach((button, number) => button.setAttribute("aria-pressed", number === chosen));
}

function showNumbers({ now, times, unit, state, elapsed_s }) {
  const workers = now.workers ?? [], clocks = workers.map(row => row.clock), rates = workers.map(row => row.samples_per_s);
  const losses = workers.map(row => row.loss).filter(loss => loss != null);
  const range = clocks.length ? [Math.min(...clocks), Math.max(...clocks)] : [0, 0];
  const ended = state === "ended", rate = ended ? sumFrom(times.series.num?.[""] ?? [], 0) / (elapsed_s || 1) : sumFrom(rates, 0);
  const numbers = {
    time: format.at(elapsed_s),
    clock: range[0] === range[1] ? range[0] : `${range[0]}–${range[1]}`,
    [ended ? `${unit}/s, mean` : "samples/s"]: rates.some(each => each != null) || ended ? format.number(rate) : "–",
    loss: losses.length ? format.loss(losses.reduce((a, b) => a + b) / losses.length) : "–",
    "stale, p99": Math.max(...workers.map(row => row.staleness_p99 ?? 0), 0),
    workers: workers.filter(row => !row.state.startsWith("dead")).length,
    servers: (now.servers ?? []).length,
  };
  replace(find("numbers"), Object.entries(numbers).map(([name, text]) => {
    const group = node("div", "");
    group.append(node("dt", "", name), node("dd", "", text));
    return group;
  }));
}

function showWorkers(rows, blamed, ended) {
  replace(find("workers").tBodies[0], rows.map(row => {
    const line = node("tr", String(row.worker) === blamed ? "blamed" : ""), waits = Object.entries(row.wait_s ?? {});
    const forWorkers = waits.filter(([of]) => of.startsWith("worker")), total = row.step_s || 1;
    const waited = forWorkers.reduce((sum, [, s]) => sum + s, 0);
    const wire = (row.push_s ?? 0) + waits.reduce((sum, [, s]) => sum + s, 0) - waited;
    const [awaited, longest] = forWorkers.sort((a, b) => b[1] - a[1])[0] ?? [];
    const state = row.state === "computing" || (ended && row.step_s && !row.state.startsWith("dead")) ? "" : row.state;
    const cells = [
      [row.worker], [row.clock], [row.lead == null ? "–" : `+${row.lead}`], [format.loss(row.loss), "more"],
      [format.number(row.samples_per_s), "more"], [format.seconds(row.step_s)],
      [state || split([row.compute_s, row.data_s, waited, wire], total), "bar"],
      [longest > total / 100 ? awaited : "–"], [row.staleness_p50 == null ? "–" : `${row.staleness_p50}/${row.staleness_p99}`],
      [format.bytes(row.rss_bytes || null), "more"],
    ];
    line.append(...cells.map(([content, kind]) => node("td", kind ?? "", content)));
    return line;
  }));
}

function split(parts, total) {
  const bar = node("div", "split");
  bar.append(...PARTS.map((part, number) => {
    const piece = node("i", "");
    piece.style.width = `${100 * (parts[number] ?? 0) / total}%`;
    piece.style.background = `var(--${part})`;
    return piece;
  }));
  const told = PARTS.map((part, number) => `${part} ${format.percent((parts[number] ?? 0) / total)}`).join(", ");
  bar.title = told;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", told);
  return bar;
}

function showServers(rows, blamed) {
  replace(find("servers").tBodies[0], rows.map(row => {
    const hot = row.hot_row ? `, row ${row.hot_row.id} in ${format.percent(row.hot_row.share)}` : "";
    const line = node("tr", blamed === `server ${row.server}` ? "blamed" : "");
    const cells = [
      [row.server], [format.percent(row.busy)], [format.seconds(row.apply_s)], [row.queue, "more"],
      [row.replica_lag ?? "-", "more"], [`${format.bytes(row.received_per_s)}/s`], [`${format.bytes(row.sent_per_s)}/s`], [format.bytes(row.rss_bytes || null), "more"],
      [row.lives, "more"], [row.table + hot, "text"],
    ];
    line.append(...cells.map(([content, kind]) => node("td", kind ?? "", content)));
    return line;
  }));
}

function showEvents(events) {
  replace(find("events"), [...events].reverse().map(([at, text]) => {
    const line = node("li", "");
    line.append(node("time", "", format.at(at)), node("span", "", text));
    return line;
  }));
}

// -- elements --------------------------------------------------------------------------------------------------------

function node(name, kind, ...content) {
  const made = document.createElement(name);
  if (kind) made.className = kind.trim();
  made.append(...content.map(each => each instanceof Node ? each : String(each)));
  return made;
}

function swatch(hue) {
  const made = node("span", "swatch");
  made.style.background = hue;
  return made;
}

/** Replace the children of an element, unless they are the same: what is selected or hovered stays so. */
function replace(parent, children) {
  const made = document.createElement("template").content;
  made.append(...children);
  if (parent.childElementCount !== made.childElementCount || [...parent.children].some((child, place) => !child.isEqualNode(made.children[place])))
    parent.replaceChildren(made);
}

find("parts").append(...PARTS.map(part => {
  const item = node("li", "");
  item.append(swatch(`var(--${part})`), { compute: "compute", data: "wait for data", wait: "wait for values", wire: "push and wire" }[part]);
  return item;
}));
document.querySelectorAll("[data-by]").forEach(button => button.addEventListener("click", () => {
  bytesBy = button.dataset.by;
  document.querySelectorAll("[data-by]").forEach(each => each.setAttribute("aria-pressed", each === button));
  show();
}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  Object.values(charts).forEach(chart => chart.forget());
  if (runs.length) show();
});
listen();
