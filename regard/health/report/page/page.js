(async () => {
  const data = await unpack(byId("numbers").textContent);
  if (!data.layers.length) { document.body.dataset.ready = "true"; return; }
  const KEYS = ["mean", "std", "min", "q05", "q50", "q95", "max"];
  const state = { statistic: 0, treatment: 0, layer: 0, head: 0, kind: null };  // kind: the cause whose heads alone are marked
  const name = (statistic) => data.statistics[statistic].replaceAll("_", " ");

  const flagged = data.treatments.map((treatment) => new Map(treatment.flagged.map(([layer, head, severity, kinds]) => [`${layer} ${head}`, { severity, kinds }])));
  const rowOf = new Map(data.layers.map((layer, row) => [layer.index, row]));
  const tables = data.treatments.map((treatment) => arrange(data.layers, treatment.heads));
  const widths = tables[0].map((row) => row.length);
  const widest = Math.max(...widths);
  const headOf = (treatment, row, head) => tables[treatment][row][head];

  // one colour range per statistic, shared by all treatments; for fractions each treatment has its own, mostly 0 to 1
  const means = (treatment, s) => treatment.heads.map((head) => head.numbers[s][0]);
  const shared = data.statistics.map((statistic, s) => rangeOf(statistic, data.treatments.flatMap((t) => means(t, s))));
  const rangeNow = (s) => FRACTIONS.has(data.statistics[s]) ? rangeOf(data.statistics[s], means(data.treatments[state.treatment], s)) : shared[s];

  const fill = (select, items) => items.forEach((text, value) => { make("option", select, text).value = value; });
  fill(byId("statistic"), data.statistics.map((_, s) => name(s)));
  data.treatments.forEach((treatment, at) => {
    const label = make("label", byId("treatment")), radio = make("input", label);
    Object.assign(radio, { type: "radio", name: "treatment", value: at });
    label.append(at ? `if ${treatment.name}` : treatment.name);
    radio.addEventListener("change", () => choose({ treatment: at }));
  });
  byId("treatment").hidden = data.treatments.length < 2;
  fill(byId("layer"), data.layers.map((layer) => `${layer.index} ${layer.name}`));
  for (const key of ["statistic", "layer", "head"]) {
    byId(key).addEventListener("change", (event) => choose({ [key]: Number(event.target.value) }));
  }

  // every layer fits into the window: rows get lower as there are more of them
  const size = Math.max(12, Math.min(46, Math.floor((document.querySelector(".first") ? 290 : 700) / widest))), left = 34, top = 20;
  const high = Math.max(9, Math.min(size, Math.floor(430 / data.layers.length)));
  byId("map").parentElement.style.width = `${Math.max(left + widest * size + 4, 240)}px`;
  const rings = new Map();
  const { svg, cells } = buildMap({ parent: byId("map"), label: "Layer by head map", layers: data.layers, widths, size, high, left, top }, state, (where) => choose(where));
  cells.forEach((row, r) => row.forEach((cell, head) => {
    const centre = { x: left + (head + 0.5) * size, y: top + (r + 0.5) * high }, radius = Math.max(2.4, Math.min(size, high) / (Math.min(size, high) < 16 ? 2.5 : 3.4));
    const circle = draw("circle", { cx: centre.x, cy: centre.y, r: radius, class: "ring" }, svg);
    const number = radius < 4.5 ? null : draw("text", { x: centre.x, y: centre.y + 3.2, "text-anchor": "middle", class: "number" }, svg);
    rings.set(cell, { circle, number });
  }));
  for (let head = 0; head < widest; head += widest > 24 ? 8 : widest > 12 ? 4 : 1) {
    draw("text", { x: left + (head + 0.5) * size, y: top - 6, "text-anchor": "middle" }, svg, head);
  }
  if (widest > 40) byId("map").classList.add("wide");

  const numberOf = (kinds) => data.causes.findIndex((kind) => kinds.includes(kind)) + 1 || "";
  const paintMap = () => {
    const s = state.statistic, range = rangeNow(s);
    data.layers.forEach((layer, row) => cells[row].forEach((cell, head) => {
      const one = headOf(state.treatment, row, head);
      const value = one ? one.numbers[s][0] : null;
      const t = place(value, range);
      cell.setAttribute("fill", colour(t));
      const found = flagged[state.treatment].get(`${layer.index} ${head}`);
      const mark = found && (!state.kind || found.kinds.includes(state.kind)) ? found : null;
      const { circle, number } = rings.get(cell);
      circle.setAttribute("class", mark ? `ring ${mark.severity}${t > LIGHT ? " on-light" : ""}` : "ring none");
      if (number) number.textContent = mark ? numberOf(state.kind ? [state.kind] : mark.kinds) : "";
      cell.classList.toggle("chosen", row === state.layer && head === state.head);
      cell.querySelector("title").textContent = `layer ${layer.index}, head ${head}: ${name(s)} ${show(value)}${mark ? `; ${mark.kinds.join(", ")}` : ""}`;
    }));
    const scale = byId("scale");
    ruler(scale, range, colour);
    const severities = new Set([...flagged[state.treatment].values()].map((mark) => mark.severity));
    for (const severity of ["critical", "warning", "note"]) if (severities.has(severity)) make("span", scale, severity, `key ${severity}`);
    if (!severities.size) make("span", scale, "no head has findings");
    make("span", scale, `rows: layers, columns: heads${svg.querySelector(".number") && severities.size && data.causes.length ? ", numbers: causes" : ""}`);
    document.querySelectorAll(".place[data-kind]").forEach((button) => button.setAttribute("aria-pressed", button.dataset.kind === state.kind));
    byId("meaning").textContent = data.meaning[s];
  };

  const chart = (parent, label) => {
    parent.replaceChildren();
    return draw("svg", { viewBox: "0 0 480 210", role: "img", "aria-label": label }, parent);
  };
  const paintHistogram = (one, before) => {
    const s = state.statistic, edges = data.axes[s], shape = one.shapes[s] ?? [];
    if (!shape.length) { byId("histogram-title").textContent = `${name(s)}: one number for each head`; byId("histogram").replaceChildren(); return; }
    byId("histogram-title").textContent = `${name(s)}: fraction of rows`;
    const svg = chart(byId("histogram"), `Distribution of ${name(s)}: median ${quantile(one, s, 4)}, from ${show(one.numbers[s][2])} to ${show(one.numbers[s][6])}`);
    const top = Math.max(...shape, ...(before ? before.shapes[s] : [0]), 1), width = 470 / shape.length;
    const bars = (values, className) => values.forEach((value, i) => {
      if (value) draw("rect", { x: 5 + i * width, y: 175 - 160 * value / top, width: Math.max(width - 1, 0.8), height: 160 * value / top, class: className }, svg);
    });
    if (before) bars(before.shapes[s], "bar before");
    bars(shape, "bar");
    draw("line", { x1: 5, x2: 475, y1: 175, y2: 175, class: "axis" }, svg);
    for (const { x, place } of ticks(edges, 5, 470, 58)) {
      draw("line", { x1: place, x2: place, y1: 175, y2: 179, class: "axis" }, svg);
      const anchor = place < 25 ? "start" : place > 455 ? "end" : "middle";
      draw("text", { x: place, y: 192, "text-anchor": anchor }, svg, show(x));
    }
    draw("text", { x: 5, y: 12 }, svg, `${show(top / 10, 2)} %`);
  };
  const paintCurve = (one, before) => {
    const statistic = data.statistics[state.statistic], pairs = (curves) => curves?.[statistic]?.map((value, i) => [curves.at[i], value]);
    const curve = pairs(one.curves), past = pairs(before?.curves);
    byId("curve-title").textContent = curve ? `${name(state.statistic)} by position of the query in the text` : `${name(state.statistic)} is not recorded by position`;
    byId("curve").replaceChildren();
    if (!curve) return;
    const svg = chart(byId("curve"), `Mean ${name(state.statistic)} by query position`);
    const last = Math.max(...curve.map(([position]) => position), 1);
    const most = FRACTIONS.has(statistic) ? 1 : Math.max(...curve.map(([, value]) => value ?? 0), ...(past ?? []).map(([, value]) => value ?? 0), 1e-9);
    const x = (position) => 40 + 430 * Math.log2(1 + position) / Math.log2(1 + last);
    const y = (value) => 175 - 160 * value / most;
    for (const value of [0, most / 2, most]) {
      draw("line", { x1: 40, x2: 470, y1: y(value), y2: y(value), class: "axis" }, svg);
      draw("text", { x: 35, y: y(value) + 4, "text-anchor": "end" }, svg, show(value, 2));
    }
    for (let mark = 1; mark <= last; mark *= 4) draw("text", { x: x(mark), y: 192, "text-anchor": "middle" }, svg, mark);
    const path = (points, className) => {
      const known = points.filter(([, value]) => value !== null);
      draw("polyline", { points: known.map(([p, v]) => `${x(p).toFixed(1)},${y(v).toFixed(1)}`).join(" "), class: className }, svg);
    };
    if (past) path(past, "line before");
    path(curve, "line");
  };
  const quantile = (one, s, i) => showQuantile(one.numbers[s][i], data.least[s], one.numbers[s][6]);
  const paintTable = (one) => {
    const table = byId("numbers-table");
    table.querySelectorAll("thead, tbody").forEach((part) => part.remove());
    const headRow = make("tr", make("thead", table));
    ["", ...KEYS].forEach((key) => make("th", headRow, key));
    const body = make("tbody", table);
    data.statistics.forEach((statistic, s) => {
      const row = make("tr", body, undefined, s === state.statistic ? "now" : "");
      row.dataset.statistic = statistic;
      const cell = make("th", row);
      const link = make("a", cell, name(s), "word");
      link.href = `#word-${name(s).replaceAll(" ", "-")}`;
      link.title = data.meaning[s];
      KEYS.forEach((key, i) => { make("td", row, key.startsWith("q") ? quantile(one, s, i) : show(one.numbers[s][i])).dataset.key = key; });
    });
  };

  const showTokens = makeTokenView(data.tokens);
  const choose = (changes) => {
    Object.assign(state, changes);
    const heads = widths[state.layer];
    state.head = Math.min(state.head, heads - 1);
    if (byId("head").childElementCount !== heads) {
      byId("head").replaceChildren();
      fill(byId("head"), Array.from({ length: heads }, (_, head) => head));
    }
    for (const key of ["statistic", "layer", "head"]) byId(key).value = state[key];
    document.querySelectorAll("#treatment input").forEach((radio) => { radio.checked = Number(radio.value) === state.treatment; });
    paintMap();
    const layer = data.layers[state.layer];
    const one = headOf(state.treatment, state.layer, state.head);
    const before = state.treatment ? headOf(0, state.layer, state.head) : null;
    const under = state.treatment ? `, if ${data.treatments[state.treatment].name}` : "";
    byId("chosen").textContent = `Layer ${layer.index}, head ${state.head} · ${layer.name}${under}`;
    byId("chosen-again").textContent = byId("chosen").textContent;
    byId("chosen").href = `#layer-${layer.index}-head-${state.head}`;
    showTokens(layer.index, state.head);
    if (byId("tokens-note")) byId("tokens-note").hidden = !state.treatment;
    if (one && byId("histogram")) { paintHistogram(one, before); paintCurve(one, before); }
    if (one) paintTable(one);
  };

  enableCopy();
  const chips = [...document.querySelectorAll(".chip")];
  const reachable = chips.filter((chip) => rowOf.has(Number(chip.dataset.layer)));
  chips.forEach((chip) => { chip.disabled = !reachable.includes(chip); });
  const scrollToHead = () => byId("chosen").scrollIntoView({ behavior: "smooth", block: "start" });
  for (const chip of reachable) if (chip.dataset.kind) chip.title = "Show only this cause on the map";
  reachable.forEach((chip) => chip.addEventListener("click", () => {
    const { kind } = chip.dataset, again = kind && state.kind === kind;
    if (kind) choose({ kind: again ? null : kind });
    if (again) return;
    choose({ layer: rowOf.get(Number(chip.dataset.layer)), head: Number(chip.dataset.head) });
    if (!kind) scrollToHead();
  }));

  const [layer, head] = data.first;
  choose({ layer: rowOf.get(layer), head });
  followLinks((index, head) => {
    if (!rowOf.has(index) || head >= widths[rowOf.get(index)]) return;
    choose({ layer: rowOf.get(index), head });
    scrollToHead();
  });
  document.body.dataset.ready = "true";
})();
