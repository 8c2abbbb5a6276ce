// Draws: lines by uPlot, the timeline of workers and the staleness of reads on canvases of their own.
"use strict";

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seriesColours = () => style("--series").split(/\s+/);
const PARTS = ["compute", "data", "wait", "wire"];

const format = {
  seconds(s) {
    if (s == null) return "–";
    if (s < 1) return `${(1000 * s).toFixed(s < 0.1 ? 1 : 0)} ms`;
    if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
    return s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
  },
  at(s) {
    const two = number => String(Math.floor(number)).padStart(2, "0");
    if (s < 60) return `${+s.toFixed(1)} s`;
    return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(s / 60 % 60)}:${two(s % 60)}`;
  },
  number(n) {
    if (n == null) return "–";
    for (const [least, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (Math.abs(n) >= least) return `${+(n / (unit === "k" ? 1e3 : least)).toPrecision(3)}${unit}`;
    return Math.abs(n) >= 100 ? n.toFixed(0) : String(+n.toPrecision(3));
  },
  bytes(n) {
    if (!n && n !== 0) return "–";
    for (const [least, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (n >= least) return `${+(n / least).toPrecision(3)} ${unit}`;
    return `${Math.round(n)} B`;
  },
  percent: share => share == null ? "–" : `${Math.round(100 * share)} %`,
  loss: loss => loss == null ? "–" : loss.toPrecision(4),
};

/** Lines in an element: made once for a set of names and a theme, then given new numbers. */
class Lines {
  constructor(element, xText, yText, { together, range = fromZero } = {}) {
    Object.assign(this, { element, xText, yText, together, range, key: "", plot: null });
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(element);
  }

  size() {
    return { width: Math.max(200, this.element.clientWidth), height: 200 };
  }

  /** `lines`: [{name, colour, x, y, width, low, high}], `low` and `high` being a band around it. */
  show(lines) {
    const bands = lines.length === 1 && lines[0].low;
    const tables = lines.map(line => bands ? [line.x, line.y, line.low, line.high] : [line.x, line.y]);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]];
    const key = JSON.stringify(lines.map(line => [line.name, line.colour]));
    if (key !== this.key) {
      this.key = key;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(lines, bands), data, this.element);
    } else this.plot.setData(data);
  }

  forget() {
    this.key = "";
  }

  options(lines, bands) {
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const known = v => v == null ? "" : this.yText(v);
    const told = (plot, v, _, place) => bands && v != null ? `${known(v)} (${known(plot.data[2][place])} – ${known(plot.data[3][place])})` : known(v);
    const series = lines.map(line => ({ label: line.name, stroke: line.colour, width: 2, spanGaps: true, points: { show: plot => plot.data[0].length < 3 }, value: told }));
    const edge = { stroke: "transparent", spanGaps: true, points: { show: false }, class: "edge" };
    if (bands) series.push(edge, edge);
    return {
      ...this.size(),
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low ?? 0, high ?? 1) } },
      axes: [
        { ...axis, values: (_, marks) => marks.map(this.xText), space: 70, size: 28 },
        { ...axis, values: (_, marks) => marks.map(this.yText), size: 64 },
      ],
      series: [{ label: "at", value: (_, v) => v == null ? "" : this.xText(v) }, ...series],
      bands: bands ? [{ series: [3, 2], fill: lines[0].colour + "2e" }] : [],
      legend: { show: true },
      cursor: { points: { size: 7 }, drag: { x: false, y: false }, ...(this.together && { sync: { key: this.together } }) },
    };
  }
}

const fromZero = (low, high) => [Math.min(0, low), (high || 1) * 1.06];

/** What there is, and zero if that is near. */
function around(low, high) {
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low < 0.4 * high ? 0 : low - room, high + room];
}

/** A canvas as wide as its element, with a line of text for what is under the pointer. */
class Drawing {
  constructor(element) {
    this.element = element;
    this.canvas = element.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.hint = element.appendChild(document.createElement("output"));
    this.redraw = () => {};
    new ResizeObserver(() => this.redraw()).observe(element);
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.hint.value = "");
  }

  point(event) {
    const text = this.textAt?.(event.offsetX, event.offsetY) ?? "";
    this.hint.value = text;
    const room = this.element.clientWidth - this.hint.offsetWidth;
    this.hint.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
    this.hint.style.top = `${event.offsetY + 16}px`;
  }

  begin(height, label) {
    const width = this.element.clientWidth, ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.setAttribute("aria-label", label);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    return [context, width];
  }

  /** Times below, as many as fit. */
  timeAxis(context, left, right, y, seconds) {
    context.fillStyle = style("--quiet");
    const step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400]
      .find(each => each / seconds * (right - left) >= 70) ?? 1e6;
    for (let at = 0; at <= seconds; at += step) {
      const x = left + at / seconds * (right - left);
      context.textAlign = at === 0 ? "left" : x > right - 20 ? "right" : "center";
      context.fillText(format.at(at), x, y);
    }
  }
}

/** A row for each worker, in which each span of time is divided by where it went. */
class Timeline extends Drawing {
  show(axis, events, blamed) {
    this.redraw = () => this.draw(axis, events, blamed);
    this.redraw();
  }

  draw(axis, events, blamed) {
    const series = axis.series, workers = Object.keys(series.compute ?? {}).sort((a, b) => a - b);
    const row = Math.max(5, Math.min(20, Math.floor(400 / (workers.length || 1)))), left = 34, height = workers.length * row;
    const [context, width] = this.begin(height + 24, `Where the time of ${workers.length} workers went: see the table below`);
    const column = (width - left) / (axis.num || 1), colours = PARTS.map(part => style(`--${part}`));
    const split = (worker, place) => PARTS.map(part => series[part]?.[worker]?.[place] ?? 0);
    workers.forEach((worker, number) => {
      const top = number * row, inner = row > 8 ? row - 2 : row - 1;
      if (row >= 12 || number % 4 === 0) {
        context.fillStyle = worker === blamed ? style("--bad") : style("--quiet");
        context.textAlign = "right";
        context.fillText(worker, left - 8, top + row / 2);
      }
      for (let place = 0; place < axis.num; place++) {
        const parts = split(worker, place), sum = parts.reduce((a, b) => a + b);
        if (sum <= 0) continue;
        let y = top;
        parts.forEach((part, kind) => {
          const size = part / sum * inner;
          context.fillStyle = colours[kind];
          context.fillRect(left + place * column, y, column + 0.4, size);
          y += size;
        });
      }
    });
    context.fillStyle = style("--ink");
    for (const [at, text] of events)
      if (!/ (joined|left)$/.test(text)) context.fillRect(left + at / axis.width * column - 0.75, 0, 1.5, height);
    this.timeAxis(context, left, width, height + 13, axis.num * axis.width);
    this.textAt = (x, y) => {
      const worker = workers[Math.floor(y / row)], place = Math.floor((x - left) / column);
      if (worker == null || place < 0 || place >= axis.num) return "";
      const parts = split(worker, place), sum = parts.reduce((a, b) => a + b);
      const told = PARTS.map((part, kind) => `${part} ${format.percent(parts[kind] / sum)}`);
      return `worker ${worker}, ${format.at(place * axis.width)}: ${sum > 0 ? told.join(", ") : "no step"}`;
    };
  }
}

/** A column for each span of time, in which each staleness is as dark as its share; and bars of the last spans. */
class Staleness extends Drawing {
  show(axis, bars) {
    this.redraw = () => this.draw(axis, bars);
    this.redraw();
  }

  draw(axis, bars) {
    const counts = axis.series.stale ?? {}, most = Math.max(3, ...Object.keys(counts).map(Number));
    const shown = bars.filter(bar => bar <= most), row = 20, left = 46, height = shown.length * row;
    const [context, width] = this.begin(height + 24, "Share of reads by staleness, over time");
    const right = width - Math.max(110, Math.min(260, width * 0.25)), column = (right - left - 14) / (axis.num || 1);
    const count = (bar, place) => counts[bar]?.[place] ?? 0;
    const sums = Array.from({ length: axis.num }, (_, place) => shown.reduce((sum, bar) => sum + count(bar, place), 0));
    const first = Math.max(0, axis.num - Math.max(4, Math.ceil(10 / axis.width)));
    const recent = shown.map(bar => sumFrom(counts[bar] ?? [], first)), all = recent.reduce((a, b) => a + b, 0) || 1;
    shown.forEach((bar, number) => {
      const top = height - (number + 1) * row, next = bars[bars.indexOf(bar) + 1];
      context.globalAlpha = 1;
      context.fillStyle = style("--quiet");
      context.textAlign = "right";
      context.fillText(next == null ? `${bar}+` : next - bar > 1 ? `${bar}–${next - 1}` : bar, left - 8, top + row / 2);
      context.fillStyle = style("--heat");
      for (let place = 0; place < axis.num; place++)
        if (count(bar, place)) {
          context.globalAlpha = 0.08 + 0.92 * count(bar, place) / sums[place];
          context.fillRect(left + place * column, top + 1, column + 0.4, row - 2);
        }
      context.globalAlpha = 1;
      context.fillRect(right, top + 3, (width - right - 52) * recent[number] / all, row - 6);
      context.fillStyle = style("--ink");
      context.fillText(format.percent(recent[number] / all), width, top + row / 2);
    });
    this.timeAxis(context, left, right - 14, height + 13, axis.num * axis.width);
    context.textAlign = "left";
    context.fillText(`last ${format.at((axis.num - first) * axis.width)}`, right, height + 13);
    this.textAt = (x, y) => {
      const bar = shown[Math.floor((height - y) / row)], place = Math.floor((x - left) / column);
      if (bar == null || !sums[place]) return "";
      return `${format.at(place * axis.width)}: ${format.percent(count(bar, place) / sums[place])} of reads, ${bar} clocks old`;
    };
  }
}

const sumFrom = (values, first) => values.slice(first).reduce((sum, value) => sum + (value ?? 0), 0);
