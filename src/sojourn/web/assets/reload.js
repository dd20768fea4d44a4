// A page whose scripts or styles could not all be fetched, because the network changed or the server was just starting, is loaded
// again: a few times, a second apart. No module: it must run when those cannot be fetched.
{
  const KEY = "sojourn.reloads", MOST = 5;
  let failed = false;
  addEventListener("error", ({ target }) => {
    const tries = Number(sessionStorage.getItem(KEY) ?? 0);
    if (failed || tries >= MOST || !target.matches?.("script, link[rel=stylesheet]")) return;
    failed = true;
    sessionStorage.setItem(KEY, String(tries + 1));
    setTimeout(() => location.reload(), 1000);
  }, true);
  addEventListener("load", () => setTimeout(() => failed || sessionStorage.removeItem(KEY), 1000));
}
