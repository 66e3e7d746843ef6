// The charts of a topic. Their figures are in the page, and in its table for readers without them.
"use strict";
(() => {
  const place = document.getElementById("charts");
  if (!place || !window.uPlot) return;
  const data = JSON.parse(place.dataset.points);
  const HEIGHT = 200;
  let charts = [];

  const number = (value) => value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const count = (value) => value == null ? "–" : value.toLocaleString("en");
  const seconds = (value) => value == null ? "–" : value === 0 ? "0" : value < 1e-3 ? `${number(value * 1e6)} µs` : value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
  const clock = (at) => new Date(at * 1e3).toISOString().slice(11, 16);
  const PARTS = [
    ["rates", number, [["In", "arriving", "--dim", [4, 3]], ["Out", "acked", "--link", []], ["Failed", "failed", "--alarm", []]]],
    ["lag", count, [["Lag", "lag", "--link", []]]],
    ["p95", seconds, [["p95", "p95", "--link", []]]],
  ];

  const draw = () => {
    charts.forEach((each) => each.destroy());
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
    charts = PARTS.map(([id, shown, series]) => {
      const box = document.getElementById(`chart-${id}`);
      return new uPlot({
        width: box.clientWidth,
        height: HEIGHT,
        tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), "UTC"),
        cursor: { sync: { key: "topic" }, drag: { x: false, y: false } },
        scales: { y: { range: (_chart, _least, most) => [0, most > 0 ? most * 1.1 : 1] } },
        axes: [{ ...axis, values: (_chart, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (_chart, ticks) => ticks.map(shown) }],
        series: [
          { label: "UTC", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" },
          ...series.map(([label, , name, dash]) => ({ label, stroke: color(name), dash, width: 1.5, points: { show: false }, value: (_chart, value) => shown(value) })),
        ],
      }, [data.at, ...series.map(([, name]) => data[name])], box);
    });
  };

  place.hidden = false;
  draw();
  document.addEventListener("console:theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", () => charts.forEach((each) => each.setSize({ width: each.root.parentElement.clientWidth, height: HEIGHT })));
})();
