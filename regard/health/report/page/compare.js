(async () => {
  const data = await unpack(byId("numbers").textContent);
  if (!data.layers.length) { document.body.dataset.ready = "true"; return; }
  const name = (s) => data.statistics[s].replaceAll("_", " ");
  const tables = data.reports.map((heads) => arrange(data.layers, heads));
  const widths = data.layers.map((_, row) => Math.max(tables[0][row].length, tables[1][row].length));
  const mean = (report, s, row, head) => { const one = tables[report][row][head]; return one ? one.numbers[s][0] : null; };
  const change = (s, row, head) => {
    const a = mean(0, s, row, head), b = mean(1, s, row, head);
    return a === null || b === null ? null : b - a;
  };

  // a fall is blue, a rise is red, no change is the grey of the theme
  const rest = matchMedia("(prefers-color-scheme: dark)").matches ? [58, 64, 74] : [222, 222, 218];
  const diverging = (t) => {
    if (t === null || Number.isNaN(t)) return "rgb(128 128 128 / 0.25)";
    const x = Math.min(Math.max(2 * t - 1, -1), 1), end = x < 0 ? [38, 103, 168] : [190, 60, 45];
    return `rgb(${rest.map((c, i) => Math.round(c + (end[i] - c) * Math.abs(x))).join(" ")})`;
  };

  const state = { statistic: 0, layer: 0, head: 0 };
  const size = Math.max(7, Math.min(26, Math.floor(170 / Math.max(...widths)))), high = Math.max(8, Math.min(size, Math.floor(420 / widths.length)));
  const build = (id, label) => buildMap(
    { parent: byId(id), label: `${label}: layer by head map`, layers: data.layers, widths, size, high, left: 26, top: 0 }, state, (where) => choose(where)).cells;
  const maps = [build("map-a", "A"), build("map-b", "B"), build("map-change", "B minus A")];

  const each = (paint) => data.layers.forEach((layer, row) => { for (let head = 0; head < widths[row]; head++) paint(layer, row, head); });
  const paint = () => {
    const s = state.statistic, all = [], changes = [];
    each((_, row, head) => { all.push(mean(0, s, row, head), mean(1, s, row, head)); changes.push(change(s, row, head)); });
    const range = rangeOf(data.statistics[s], all), most = changes.reduce((top, x) => Math.max(top, Math.abs(x ?? 0)), 1e-12);
    const apart = { low: -most, high: most, log: false };
    each((layer, row, head) => {
      const values = [mean(0, s, row, head), mean(1, s, row, head), change(s, row, head)];
      maps.forEach((cells, m) => {
        const cell = cells[row][head];
        cell.setAttribute("fill", m < 2 ? colour(place(values[m], range)) : diverging(place(values[m], apart)));
        cell.classList.toggle("chosen", row === state.layer && head === state.head);
        cell.querySelector("title").textContent = `layer ${layer.index}, head ${head}: ${show(values[0])} → ${show(values[1])}`;
      });
    });
    for (const id of ["scale-a", "scale-b"]) ruler(byId(id), range, colour);
    ruler(byId("scale-change"), apart, diverging);
    byId("meaning").textContent = data.meaning[s];
  };
  const paintTable = () => {
    const table = byId("numbers-table");
    table.querySelectorAll("thead, tbody").forEach((part) => part.remove());
    const top = make("tr", make("thead", table));
    ["", "", ...data.keys].forEach((key) => make("th", top, key));
    const body = make("tbody", table), most = data.keys.indexOf("max");
    data.statistics.forEach((statistic, s) => ["A", "B"].forEach((letter, report) => {
      const row = make("tr", body, undefined, s === state.statistic ? "now" : "");
      row.dataset.statistic = statistic;
      if (report === 0) make("th", row, name(s)).rowSpan = 2;
      make("th", row, letter, "side");
      const one = tables[report][state.layer][state.head]?.numbers;
      data.keys.forEach((key, at) => {
        const x = one ? one[s][at] : null;
        make("td", row, one && key.startsWith("q") ? showQuantile(x, data.least[s], one[s][most]) : show(x)).dataset.key = `${key} ${letter.toLowerCase()}`;
      });
    }));
  };

  const choose = (changes) => {
    Object.assign(state, changes);
    byId("statistic").value = state.statistic;
    paint();
    paintTable();
    const layer = data.layers[state.layer];
    byId("chosen").textContent = `Layer ${layer.index}, head ${state.head} · ${layer.name}`;
    byId("chosen").href = `#layer-${layer.index}-head-${state.head}`;
  };
  data.statistics.forEach((_, s) => { make("option", byId("statistic"), name(s)).value = s; });
  byId("statistic").addEventListener("change", (event) => choose({ statistic: Number(event.target.value) }));
  const rowOf = new Map(data.layers.map((layer, row) => [layer.index, row]));
  const go = (index, head) => {
    if (!rowOf.has(index) || head >= widths[rowOf.get(index)]) return;
    choose({ layer: rowOf.get(index), head });
    byId("maps").scrollIntoView({ behavior: "smooth", block: "start" });
  };
  for (const chip of document.querySelectorAll(".chip")) chip.addEventListener("click", () => go(Number(chip.dataset.layer), Number(chip.dataset.head)));
  enableCopy();
  choose({ layer: rowOf.get(data.first) ?? 0 });
  followLinks(go);
  document.body.dataset.ready = "true";
})();
