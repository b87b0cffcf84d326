//! Tests the page in a real browser: at several sizes, light and dark, with and without scripts.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::devtools::Browser;
use super::fixture;

/// Width and height: a small phone, a phone, a tablet, a desktop.
const SIZES: [(u32, u32); 4] = [(320, 640), (390, 844), (820, 1180), (1440, 900)];

/// The page in a file.
struct Page {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn page() -> Page {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().canonicalize().unwrap().join("report.html");
    let page = super::html(&fixture::run());
    if let Some(folder) = std::env::var_os("VDKIT_SCREENSHOTS") {
        std::fs::write(PathBuf::from(folder).join("report.html"), &page).unwrap();
    }
    std::fs::write(&path, page).unwrap();
    Page { _folder: folder, path }
}

/// Finds texts of charts that overlap one another or leave their chart.
const CROWDED: &str = r#"(() => {
  const found = [];
  document.querySelectorAll('details').forEach(d => d.open = true);
  for (const chart of document.querySelectorAll('svg.chart')) {
    if (!chart.getClientRects().length) continue;
    const frame = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll('text')].filter(t => t.textContent.trim());
    const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, b] of boxes) {
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        found.push('out: ' + text + ' in ' + chart.querySelector('title').textContent);
    }
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [, a] = boxes[i], [, b] = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 3) found.push('over: ' + boxes[i][0] + ' / ' + boxes[j][0] + ' in ' + chart.querySelector('title').textContent);
    }
  }
  document.querySelectorAll('details').forEach(d => d.open = false);
  return found;
})()"#;

/// Finds elements wider than the page, except those that scroll themselves.
const OVERFLOW: &str = r#"(() => {
  const most = document.documentElement.clientWidth;
  const found = [...document.querySelectorAll('body *')].filter(e => {
    const b = e.getBoundingClientRect();
    return b.width && b.right > most + 1 && !e.closest('.scroll, pre, .sr, .skip, svg, .bars thead');
  });
  return [document.documentElement.scrollWidth - most, found.slice(0, 5).map(e => e.outerHTML.slice(0, 120))];
})()"#;

#[test]
fn it_fits_every_size_in_light_and_dark() {
    let Some(mut browser) = Browser::start() else { return };
    let page = page();
    for (width, height) in SIZES {
        for dark in [false, true] {
            browser.window(width, height, dark);
            browser.open(&page.path);
            let at = format!("{width} wide, dark {dark}");
            let picture = browser.picture(width, None);
            if let Some(folder) = std::env::var_os("VDKIT_SCREENSHOTS") {
                let theme = if dark { "dark" } else { "light" };
                let name = PathBuf::from(folder).join(format!("report-{width}-{theme}.png"));
                std::fs::write(name, &picture).unwrap();
            }
            assert!(picture.starts_with(b"\x89PNG") && picture.len() > 30_000, "{at}");
            assert_eq!(browser.complaints(), [""; 0], "{at}");
            assert_eq!(browser.value(OVERFLOW), json!([0, []]), "{at}");
            assert_eq!(browser.value(CROWDED), json!([]), "{at}");
            let ground = browser.value("getComputedStyle(document.body).backgroundColor");
            assert_eq!(ground == "rgb(19, 22, 26)", dark, "{at}: {ground}");
        }
    }
}

fn count(browser: &mut Browser, selector: &str) -> u64 {
    browser.value(&format!("document.querySelectorAll({selector:?}).length")).as_u64().unwrap()
}

/// Rows that pass the filters, collapsed or not.
const SHOWN: &str = "[...document.querySelectorAll('tr[data-axes]')].filter(r => !r.hidden && !r.closest('[hidden]')).length";

#[test]
fn controls_work_by_keyboard() {
    let Some(mut browser) = Browser::start() else { return };
    let page = page();
    browser.window(1440, 900, false);
    browser.open(&page.path);
    let all = browser.value(SHOWN).as_u64().unwrap();
    assert!(all > 50);
    // The first tab stop is the link that skips the navigation.
    browser.key("Tab", 9, "");
    assert_eq!(browser.value("document.activeElement.className"), "skip");
    let mut stops: Vec<String> = Vec::new();
    for _ in 0..60 {
        browser.key("Tab", 9, "");
        let stop = browser.value(
            "(e => e.name || e.dataset.axis || e.dataset.map || e.className || e.tagName)(document.activeElement)",
        );
        stops.push(stop.as_str().unwrap_or_default().to_owned());
        if stops.last().is_some_and(|stop| stop == "backend") {
            break;
        }
    }
    for wanted in ["theme", "copy js", "A", "backend"] {
        assert!(stops.iter().any(|stop| stop == wanted), "{wanted}: {stops:?}");
    }
    // A focused element shows its focus.
    let ring = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle";
    assert_eq!(browser.value(ring), "solid");
    // The space bar switches off the first value of the first filter.
    browser.key(" ", 32, " ");
    let fewer = browser.value(SHOWN).as_u64().unwrap();
    assert!(fewer > 0 && fewer < all, "{fewer} of {all}");
    let first = "document.querySelector('form.filters input').value";
    let gone = format!(
        "[...document.querySelectorAll('tr[data-axes]')].filter(r => !r.hidden && r.dataset.axes.includes({first})).length"
    );
    assert_eq!(browser.value(&gone), 0);
    browser.value("document.querySelector('form.filters').reset()");
    browser.value("new Promise(r => setTimeout(r, 20))");
    assert_eq!(browser.value(SHOWN), all);
    browser.value(
        "document.querySelectorAll('form.filters input').forEach(i => i.checked && i.click())",
    );
    assert_eq!(browser.value(SHOWN), 0);
    assert_eq!(browser.value("document.querySelector('.none').hidden"), false);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn the_map_is_the_same_by_script_and_follows_its_axes() {
    let Some(mut browser) = Browser::start() else { return };
    let page = page();
    browser.window(1440, 900, false);
    browser.open(&page.path);
    let table = "document.getElementById('heat').innerText";
    let colors =
        "[...document.querySelectorAll('#heat td')].map(d => d.style.getPropertyValue('--v'))";
    let before = (browser.value(table), browser.value(colors));
    browser.value("document.querySelector('select[data-map]').dispatchEvent(new Event('change'))");
    assert_eq!((browser.value(table), browser.value(colors)), before);
    browser.value(
        "(s => { s.value = 'backend'; s.dispatchEvent(new Event('change')); })(document.querySelector('select[data-map=rows]'))",
    );
    let rows =
        browser.value("[...document.querySelectorAll('#heat tbody th')].map(h => h.textContent)");
    assert_eq!(rows, json!(["ext4", "xfs", "btrfs"]));
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn themes_can_be_chosen_and_paper_is_light() {
    let Some(mut browser) = Browser::start() else { return };
    let page = page();
    browser.window(820, 1180, false);
    browser.open(&page.path);
    let ground = "getComputedStyle(document.body).backgroundColor";
    let light = browser.value(ground);
    browser.value("document.querySelector('input[value=dark]').click()");
    let dark = browser.value(ground);
    assert!(light != dark);
    browser.value("document.querySelector('input[value=light]').click()");
    browser.window(820, 1180, true);
    assert_eq!(browser.value(ground), light);
    browser.value("document.querySelector('input[value=auto]').click()");
    assert_eq!(browser.value(ground), dark);
    browser.call("Emulation.setEmulatedMedia", json!({"media": "print"}));
    let ink = browser.value("getComputedStyle(document.body).color");
    assert_eq!(ink, "rgb(28, 34, 43)");
    let paper = browser.call("Page.printToPDF", json!({"printBackground": true}));
    assert!(paper["data"].as_str().is_some_and(|pdf| pdf.len() > 20_000));
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn everything_can_be_read_without_scripts() {
    let Some(mut browser) = Browser::start() else { return };
    let page = page();
    browser.window(390, 844, false);
    browser.call("Emulation.setScriptExecutionDisabled", json!({"value": true}));
    browser.open(&page.path);
    let text = browser.value("document.body.innerText");
    let text = text.as_str().unwrap();
    for words in ["Use here", "<disk type='file'", "k IOPS", "Published", "SNIA's rule"] {
        assert!(text.contains(words), "{words}");
    }
    let visible =
        "[...document.querySelectorAll('.js')].filter(e => e.getClientRects().length).length";
    assert_eq!(browser.value(visible), 0);
    assert!(count(&mut browser, "#heat tbody td") >= 9);
    let shown = browser.value(SHOWN);
    assert!(shown.as_u64() > Some(50), "{shown}");
    let fits: Value = browser.value(OVERFLOW);
    assert_eq!(fits[0], 0, "{fits}");
}
