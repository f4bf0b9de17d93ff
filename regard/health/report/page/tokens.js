// what a head looks at: the text coloured by received weight, the top keys of one token, a small map of the largest weights
const makeTokenView = (data) => {
  if (!data || !data.heads || !byId("tokens")) return () => {};
  const heads = new Map(data.heads.map((head) => [`${head.index} ${head.head}`, head]));
  const percent = (x) => `${Math.round(100 * x)} %`;
  const paintMap = (one, keys, chosen) => {
    const canvas = byId("weights"), rows = one.keys.length, size = Math.max(2, Math.floor(384 / Math.max(rows, keys.length)));
    canvas.width = keys.length * size;
    canvas.height = rows * size;
    const brush = canvas.getContext("2d"), ink = getComputedStyle(document.body);
    brush.fillStyle = ink.getPropertyValue("--line");
    brush.fillRect(0, chosen * size, canvas.width, size);
    brush.fillStyle = ink.getPropertyValue("--accent");
    const most = Math.max(...one.weights.flat(), 0.01);
    one.keys.forEach((row, at) => row.forEach((key, i) => {
      brush.globalAlpha = Math.max(0.12, Math.sqrt(one.weights[at][i] / most));
      brush.fillRect(key * size, at * size, size, size);
    }));
    brush.globalAlpha = 1;
    canvas.setAttribute("aria-label", `The largest weights of ${rows} tokens: a row per query, a column per key`);
    canvas.onclick = (event) => {
      const row = Math.floor(event.offsetY / canvas.clientHeight * rows);
      select(one, Math.min(Math.max(row, 0), rows - 1));
    };
  };
  const select = (one, chosen) => {
    const keys = one.text ?? data.text, queries = one.queries ?? data.text, passage = byId("passage");
    passage.replaceChildren();
    const top = new Map((one.keys[chosen] ?? []).map((key, i) => [key, one.weights[chosen][i]]));
    const most = Math.max(...one.received, 1e-9), same = !one.text;
    keys.forEach((token, at) => {
      const node = make(same ? "button" : "span", passage, token, "token");
      if (same) node.type = "button";
      node.title = `${at} ${token}: receives ${percent(one.received[at])} of this head's weight`;
      node.style.setProperty("--part", one.received[at] / most);
      node.classList.toggle("asked", same && at === chosen);
      node.classList.toggle("top", top.has(at));
      if (top.has(at)) node.dataset.weight = top.get(at).toFixed(2);
      if (same && at < one.keys.length) node.addEventListener("click", () => select(one, at));
      else if (same) node.disabled = true;
    });
    const listed = [...top].map(([key, weight]) => `${keys[key]} (${key}) ${weight.toFixed(2)}`).join(", ");
    byId("top-keys").textContent = `Token ${chosen}, ${queries[chosen]}, looks at: ${listed || "nothing with a weight of 0.01 or more"}`;
    paintMap(one, keys, chosen);
  };
  return (layer, head) => {
    const one = heads.get(`${layer} ${head}`), line = byId("head-kind");
    byId("tokens").classList.toggle("empty", !one);
    byId("weights").parentElement.hidden = !one;
    line.replaceChildren();
    if (!one) { line.textContent = "This head was not read on the short text."; return; }
    const others = Object.entries(one.scores).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, score]) => `${kind} ${score.toFixed(2)}`);
    line.append("Kind of head: ");
    const link = make("a", line, one.kind === "mixed" ? "mixed" : `${one.kind} head`, "word");
    link.href = `#word-${one.kind.replaceAll(" ", "-")}-head`;
    link.title = byId(`word-${one.kind.replaceAll(" ", "-")}-head`)?.nextElementSibling?.textContent ?? "";
    line.append(others.length ? ` (part of its weight: ${others.join(", ")}).` : " (the text is too short to tell).");
    byId("map-title").textContent = `Largest weights: a row per query, a column per key (first ${one.keys.length} tokens)`;
    select(one, one.keys.length - 1);
  };
};
