// The console works without this script. It adds live figures, keys, copying and the theme.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const byId = (id) => document.getElementById(id);

  // --- live figures: one stream, closed while the page is hidden or paused ---
  const liveUrl = document.body.dataset.live;
  const banner = byId("banner"), pauseButton = byId("pause"), pulse = byId("pulse");
  let stream = null, retry = 0, paused = false;
  try { paused = sessionStorage.getItem("streamqd-paused") === "1"; } catch { /* no storage */ }

  const setState = (word) => {
    if (!pulse) return;
    pulse.dataset.state = word;
    byId("pulse-text").textContent = word;
  };
  const setBanner = (text) => {
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = !text;
  };
  const close = () => {
    clearTimeout(retry);
    if (stream) stream.close();
    stream = null;
  };
  const open = () => {
    close();
    if (paused || document.hidden) return;
    stream = new EventSource(liveUrl);
    stream.addEventListener("part", async (event) => {
      if ("away" in document.body.dataset) { location.reload(); return; }
      setBanner("");
      setState("live");
      await htmx.swap({ text: event.data, target: byId("live"), swap: "innerMorph", sourceElement: byId("live") });
      document.dispatchEvent(new CustomEvent("console:part"));
    });
    stream.addEventListener("same", () => { setBanner(""); setState("live"); });
    stream.addEventListener("away", (event) => { setState("waiting"); setBanner(JSON.parse(event.data)); });
    stream.onerror = () => {
      setState("waiting");
      setBanner("The console does not answer. The figures are old; this page tries again.");
      if (stream && stream.readyState === EventSource.CLOSED) { retry = setTimeout(open, 3000); leaveWithoutSession(); }
    };
  };
  // A stream does not report why it was refused. If the session has expired, reload the page, which shows the login.
  const leaveWithoutSession = async () => {
    try {
      const answer = await fetch(liveUrl, { redirect: "manual" });
      if (answer.body) answer.body.cancel();
      if (answer.status === 401 || answer.type === "opaqueredirect") location.reload();
    } catch { /* the console does not answer */ }
  };
  const showPause = () => {
    pauseButton.textContent = paused ? "Resume" : "Pause";
    pauseButton.setAttribute("aria-pressed", String(paused));
    setState(paused ? "paused" : "live");
  };
  const togglePause = () => {
    paused = !paused;
    try { sessionStorage.setItem("streamqd-paused", paused ? "1" : "0"); } catch { /* no storage */ }
    showPause();
    open();
  };
  if (liveUrl && window.EventSource) {
    if (pauseButton) {
      pauseButton.hidden = false;
      pulse.hidden = false;
      pauseButton.addEventListener("click", togglePause);
      showPause();
    }
    document.addEventListener("visibilitychange", open);
    window.addEventListener("pagehide", close);
    window.addEventListener("pageshow", (event) => { if (event.persisted) open(); });
    open();
  }

  // --- keys ---
  let afterG = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && document.activeElement) { document.activeElement.blur(); return; }
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (afterG && Date.now() - afterG < 1500) {
      afterG = 0;
      const link = document.querySelector(`a[data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (event.key === "g") afterG = Date.now();
    if (event.key === "p" && pauseButton && !pauseButton.hidden) togglePause();
    if (event.key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    }
  });

  // --- copying, also over plain http, where the clipboard API is not available ---
  const copy = async (text) => {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) throw new Error("not copied");
  };
  const showCopies = () => document.querySelectorAll(".copy[hidden]").forEach((each) => { each.hidden = false; });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    try {
      await copy(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Press Ctrl+C";
      const code = button.parentElement.querySelector("code, pre");
      if (code) getSelection().selectAllChildren(code);
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  document.addEventListener("console:part", showCopies);
  showCopies();

  // --- a form whose values differ from those of its dry run shows a new dry run first ---
  const isChanged = (each) => {
    if (each.tagName !== "SELECT") return each.value !== each.defaultValue;
    const shown = [...each.options].find((one) => one.defaultSelected) ?? each.options[0];
    return Boolean(shown) && !shown.selected;
  };
  const markStale = () => document.querySelectorAll("form.act").forEach((form) => {
    const changed = [...form.querySelectorAll(".fields input:not([name=why]), .fields select, .fields textarea")].some(isChanged);
    form.toggleAttribute("data-stale", changed);
  });
  document.addEventListener("input", markStale);
  window.addEventListener("pageshow", markStale);

  // --- the result of a change is shown only once, even if the page is reloaded ---
  const address = new URL(location.href);
  if (address.searchParams.has("done")) {
    address.searchParams.delete("done");
    history.replaceState(history.state, "", address);
  }

  // --- the title of a time also has the local time ---
  const local = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  document.addEventListener("mouseover", (event) => {
    const time = event.target.closest("time");
    if (!time || zone === "UTC" || time.title.includes("\n")) return;
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.title += `\n${local.format(at)} ${zone}`;
  });

  // --- a form is sent only once ---
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "1";
  });
  window.addEventListener("pageshow", () => {
    document.querySelectorAll("form[data-sent]").forEach((each) => { delete each.dataset.sent; });
  });

  // --- theme ---
  const theme = byId("theme");
  const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const showTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  showTheme();
  theme.addEventListener("click", () => {
    const chosen = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    document.cookie = `streamqd-theme=${chosen}; path=${root}; max-age=31536000; samesite=lax`;
    showTheme();
    document.dispatchEvent(new CustomEvent("console:theme"));
  });

  // --- a menu closes when the user clicks outside of it ---
  document.addEventListener("click", (event) => {
    document.querySelectorAll("details.menu[open]").forEach((each) => { if (!each.contains(event.target)) each.open = false; });
  });
})();
