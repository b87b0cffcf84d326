//! Collects the report. Messages are formatted only for findings that are listed.

use vdkit_block::{CheckReport, Finding, Severity};

#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) report: CheckReport,
}

impl Findings {
    pub(super) fn corruption(
        &mut self,
        offset: u64,
        structure: &'static str,
        message: impl FnOnce() -> String,
    ) {
        self.add(Severity::Corruption, offset, structure, message);
    }

    /// Adds space that nothing refers to.
    pub(super) fn leak(
        &mut self,
        offset: u64,
        structure: &'static str,
        message: impl FnOnce() -> String,
    ) {
        self.add(Severity::Leak, offset, structure, message);
    }

    /// Whether further findings are only counted.
    pub(super) fn is_full(&self) -> bool {
        self.report.findings.len() >= CheckReport::FINDINGS_MAX
    }

    fn add(
        &mut self,
        severity: Severity,
        offset: u64,
        structure: &'static str,
        message: impl FnOnce() -> String,
    ) {
        if self.is_full() {
            match severity {
                Severity::Leak => self.report.leaks += 1,
                _ => self.report.corruptions += 1,
            }
        } else {
            let message = message();
            self.report.add(Finding { severity, offset, structure, message, repaired: false });
        }
    }
}
