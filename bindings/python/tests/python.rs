//! The Python package's own tests (pytest, in `tests/`) and its docstrings, on what cargo built.

use std::path::{Path, PathBuf};

use vdkit_testbase::python;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A folder with the package as a wheel has it.
fn package() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("vdkit");
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(format!("{HERE}/python/vdkit")).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    std::fs::copy(library(), to.join("_vdkit.abi3.so")).unwrap();
    folder
}

/// Cargo puts the library beside this test.
fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    std::fs::read_dir(here.parent().unwrap())
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("lib_vdkit") && name.ends_with(".so")
        })
        .max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok())
        .expect("cargo built the library")
}

#[test]
fn the_python_tests_pass() {
    let Some(mut pytest) = python("pytest") else { return };
    let (package, scratch) = (package(), tempfile::tempdir().unwrap());
    let modules = package.path().join("vdkit");
    let done = pytest
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules"])
        .args(["--doctest-glob=*.md", "--import-mode=importlib"])
        .arg(format!("--basetemp={}", scratch.path().join("pytest").display()))
        .arg(Path::new(HERE).join("tests"))
        .arg(modules.join("__init__.py"))
        .arg(Path::new(HERE).join("../../docs/python.md"))
        .env("PYTHONPATH", package.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(scratch.path())
        .output()
        .unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{said}{errors}");
    assert!(said.contains(" passed") && !said.contains("skipped"), "{said}");
}
