-- A timer keeps who scheduled it: that is who its message is from.
ALTER TABLE queen.timers ADD COLUMN producer_sub text;
