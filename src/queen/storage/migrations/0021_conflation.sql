-- Consumer groups that get only the newest message of each partition.

ALTER TABLE queen.subscriptions ADD COLUMN conflation boolean;
COMMENT ON COLUMN queen.subscriptions.conflation IS
    'Of the row for the whole queue: whether the group gets only the newest message of a partition; null: no.';
