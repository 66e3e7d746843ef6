// The charts of a topic. The live part of the page contains their figures, also as a table.
"use strict";
(() => {
  if (!window.uPlot) return;
  const HEIGHT = 200;
  let charts = [], shown = "";

  const number = (value) => value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const count = (value) => value == null ? "–" : value.toLocaleString("en");
  const seconds = (value) => value == null ? "–" : value === 0 ? "0" : value < 1e-3 ? `${number(value * 1e6)} µs` : value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
  const clock = (at) => new Date(at * 1e3).toISOString().slice(11, 16);
  const PARTS = [
    ["rates", number, [["In", "arriving", "--dim", [4, 3]], ["Out", "acked", "--link", []], ["Failed", "failed", "--alarm", []]]],
    ["lag", count, [["Lag", "lag", "--link", []]]],
    ["p95", seconds, [["p95", "p95", "--link", []]]],
  ];
  const points = () => document.getElementById("charts")?.dataset.points || "";
  const columns = (data, series) => [data.at, ...series.map(([, name]) => data[name])];

  const draw = () => {
    charts.forEach((each) => each.destroy());
    charts = [];
    shown = points();
    if (!shown) return;
    const data = JSON.parse(shown), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
    charts = PARTS.map(([id, text, series]) => {
      const box = document.getElementById(`chart-${id}`);
      return new uPlot({
        width: box.clientWidth,
        height: HEIGHT,
        tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "UTC"),
        cursor: { sync: { key: "topic" }, drag: { x: false, y: false } },
        scales: { y: { range: (_chart, _least, most) => [0, most > 0 ? most * 1.1 : 1] } },
        axes: [{ ...axis, values: (_chart, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (_chart, ticks) => ticks.map(text) }],
        series: [
          { label: "UTC", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" },
          ...series.map(([label, , name, dash]) => ({ label, stroke: color(name), dash, width: 1.5, points: { show: false }, value: (_chart, value) => text(value) })),
        ],
      }, columns(data, series), box);
    });
  };
  // A live part brings new points about once a minute. Update the charts in place, so that the cursor stays.
  const update = () => {
    const found = points();
    if (found === shown) return;
    if (!found || !charts.every((each) => each.root.isConnected) || !charts.length) { draw(); return; }
    shown = found;
    const data = JSON.parse(found);
    charts.forEach((each, at) => each.setData(columns(data, PARTS[at][2])));
  };

  document.documentElement.dataset.charts = "";
  draw();
  document.addEventListener("console:part", update);
  document.addEventListener("console:theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", () => charts.forEach((each) => each.setSize({ width: each.root.parentElement.clientWidth, height: HEIGHT })));
})();
